"""Known faults of images on the GPU: positions, places and embeddings of a run, the states they leave (tools/faults.py)."""

from __future__ import annotations

from tools.faults_kernels import Fault

_TESTS = "test:tests/test_gpu_images.py::"
_ERRORS = f"{_TESTS}test_images_are_read_with_the_errors_of_float32"
_CUTS = f"{_TESTS}test_cuts_inside_images_change_no_bit"
_KEPT = f"{_TESTS}test_snapshots_forks_and_answers_keep_positions"
_PREFIX = f"{_TESTS}test_prompts_go_on_from_snapshots_with_the_same_images_only"
_SESSION, _INPUTS, _RESIDENT = "fermi_engine/session.py", "fermi_engine/model/gpu_inputs.py", "fermi_engine/gpu/resident.py"
_PREFILL, _ENCODER, _TAKING = "fermi_engine/gpu/prefill.py", "fermi_engine/vision/encoder.py", "fermi_engine/snapshots/taking.py"

GPU_IMAGES = (
    Fault("decoded tokens stand where their number says, behind images", _RESIDENT, "*[self._position + shift]",
          "*[self._position]", _ERRORS),
    Fault("a session decodes as if there had been no image", _SESSION, "resident.decode(int(ids[0]), state, self._seen.shift)",
          "resident.decode(int(ids[0]), state)", _ERRORS),
    Fault("a decoded token's key goes where its position is", _RESIDENT, "token, self._position, *",
          "token, self._position + shift, *", _ERRORS),
    Fault("text behind images stands where its number says", _INPUTS, "np.arange(begin + self.shift, end + self.shift,",
          "np.arange(begin, end,", _ERRORS),
    Fault("rows and columns of images exchanged, resident", _RESIDENT, "positions = inputs.positions(begin, begin + len(ids))",
          "positions = inputs.positions(begin, begin + len(ids))[[0, 2, 1]]", _ERRORS),
    Fault("rows and columns of images exchanged, prefill", _PREFILL, "self.inputs.positions(begin, begin + tokens)",
          "self.inputs.positions(begin, begin + tokens)[[0, 2, 1]]", _ERRORS),
    Fault("an image one token early", _INPUTS, "x.rows(first, rows.shape[0])", "x.rows(max(0, first - 1), rows.shape[0])",
          _ERRORS),
    Fault("embeddings of words in place of the image's, resident", _RESIDENT,
          'splice(self.device, self.compute, arrays["x"]', 'splice(self.device, self.compute, arrays["branch"]', _ERRORS),
    Fault("images spliced before the words are there", _PREFILL, 'splice(owner.device, owner.compute, arrays["x"]',
          'splice(owner.device, owner.results, arrays["x"]', f"{_TESTS}test_every_schedule_gives_the_same_bits"),
    Fault("embeddings of the first image for all", _ENCODER, "                rows = self._encoded(index)\n",
          "                rows = self._encoded(0)\n", f"{_TESTS}test_another_images_rows_are_noticed"),
    Fault("a block inside an image begins with its first row", _ENCODER, "rows[a:b])", "rows[: b - a])",
          _CUTS),
    Fault("rows behind a gap in their image follow without it", _ENCODER, "!= 1) + 1\n", "!= 1)[:0] + 1\n",
          "test:tests/test_vision_engine.py::test_logits_are_within_the_spread_of_transformers"),
    Fault("a cached state's positions fall back to its count of tokens", _SESSION, "placed.shift_at(self.position))", "0)",
          f"{_TESTS}test_a_tower_that_fails_behind_a_snapshot_leaves_positions_right"),
    Fault("images are left out of rows of logits", _SESSION, "resident.rows(ids, state, self._inputs(images))",
          "resident.rows(ids, state)", f"{_TESTS}test_logits_of_every_token_with_images"),
    Fault("a session forgets the images that a resident model has seen", _SESSION,
          'taking, self._inputs(images))\n        self._went(ids, "gpu", images)',
          'taking, self._inputs(images))\n        self._went(ids, "gpu", None)', _KEPT),
    Fault("a tower fails half way through a prompt", _SESSION, "            images.encode(self.position)  # here",
          "            pass  # here", f"{_TESTS}test_a_tower_that_fails_leaves_the_session_as_it_was"),
    Fault("snapshots inside a GPU's prefill know no images", _TAKING, "Snapshot(self.prefix.head(state.position), state",
          "Snapshot(Prefix(self.prefix.ids[: state.position], self.prefix.path), state",
          f"{_TESTS}test_a_snapshot_inside_an_image_belongs_to_it"),
    Fault("an image that is cut does not count", "fermi_engine/snapshots/prefix.py", "if image.begin < position)",
          "if image.end <= position)", f"{_TESTS}test_a_snapshot_inside_an_image_belongs_to_it"),
    Fault("images are known by their places alone", "fermi_engine/snapshots/prefix.py", '"<i4").tobytes() + image.digest',
          '"<i4").tobytes()', _PREFIX),
)
