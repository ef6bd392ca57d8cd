"""Known faults of snapshots: states, pages and keys that do not belong together, room made too late, remains of aborts."""

from __future__ import annotations

from tools.faults_kernels import Fault

_CPU, _BUDGET = "test:tests/test_snapshots.py::", "test:tests/test_snapshot_budget.py::"
_GPU, _PREFIX = "test:tests/test_gpu_snapshots.py::", "test:tests/test_prefix.py::"
_PAGES = "test:tests/test_model.py::"

SNAPSHOTS = (
    Fault(
        "a snapshot's state is one token later than its prefix",
        "fermi_engine/snapshots/taking.py",
        "entry = self.cache.save(state, self.prefix.head(state.position), kind, trail, logits)",
        "entry = self.cache.save(state, self.prefix.head(state.position - (logits is None)), kind, trail, logits)",
        f"{_CPU}test_what_was_asked_does_not_matter",
    ),
    Fault(
        "the GPU leaves its states one token late",
        "fermi_engine/gpu/boundaries.py",
        "cuts = [place.position - self._begins[block] for place in self._places[block]]",
        "cuts = [place.position - self._begins[block] + (place.opened == 0) for place in self._places[block]]",
        f"{_GPU}test_one_pass_leaves_the_state_at_every_position",
    ),
    Fault(
        "convolution tails from the block's end",
        "fermi_engine/model/gpu_layers.py",
        "(x, cut - rows + old, old, rows - old)",
        "(x, x.shape[0] - rows + old, old, rows - old)",
        f"{_GPU}test_one_pass_leaves_the_state_at_every_position",
    ),
    Fault(
        "convolution tails without what came before the block",
        "fermi_engine/model/gpu_layers.py",
        "((tail, rows - old, 0, old),",
        "((tail, 0, 0, old),",
        f"{_GPU}test_one_pass_leaves_the_state_at_every_position",
    ),
    Fault(
        "keys and values of one position too few",
        "fermi_engine/state.py",
        "layer.copy(self.position) for layer in self.layers]",
        "layer.copy(self.position - 1) for layer in self.layers]",
        f"{_CPU}test_every_cut_resumes_to_the_bit",
    ),
    Fault(
        "restored keys and values of one position too few",
        "fermi_engine/state.py",
        "mine.restore(its, source.position)",
        "mine.restore(its, source.position - 1)",
        f"{_CPU}test_every_cut_resumes_to_the_bit",
    ),
    Fault(
        "a shared page is written",
        "fermi_engine/state.py",
        "        for page in range(written // self.page_tokens, self._shared):\n",
        "        for page in range(0):\n",
        f"{_CPU}test_a_fork_goes_its_own_way",
    ),
    Fault(
        "kernels go on with the page that was shared",
        "fermi_engine/state.py",
        "self._own(self.values[page])\n            self._point(page)\n",
        "self._own(self.values[page])\n",
        f"{_PAGES}test_a_shared_page_is_copied_before_it_is_written",
    ),
    Fault(
        "a restored state keeps the pages of the one before",
        "fermi_engine/state.py",
        "            mine[:count] = its[:count]\n",
        "",
        f"{_CPU}test_every_cut_resumes_to_the_bit",
    ),
    Fault(
        "what a ruined session held shines through",
        "fermi_engine/state.py",
        "        for array in self._deltas():\n            array[...] = 0\n",
        "",
        f"{_CPU}test_evicted_and_made_again",
    ),
    Fault(
        "open chunks are lost in copies",
        "fermi_engine/state.py",
        "other = HybridState(self.position, layers, open_chunks=self.current_chunks())",
        "other = HybridState(self.position, layers)",
        f"{_GPU}test_short_tails_after_a_hit_go_the_same_way",
    ),
    Fault(
        "the key of a prefix knows nothing of its images' content",
        "fermi_engine/snapshots/prefix.py",
        '"<i4").tobytes() + image.digest',
        '"<i4").tobytes()',
        f"{_BUDGET}test_the_same_tokens_with_another_picture_are_another_prefix",
    ),
    Fault(
        "the key of a prefix knows nothing of how it was computed",
        "fermi_engine/snapshots/prefix.py",
        "hash = blake2b(digest_size=DIGEST_BYTES, key=self.path.digest())",
        "hash = blake2b(digest_size=DIGEST_BYTES)",
        f"{_PREFIX}test_what_makes_a_digest_another",
    ),
    Fault(
        "room is made after a snapshot is allocated",
        "fermi_engine/snapshots/cache.py",
        "            need = self._room_for(own, {**shared, **rest})\n",
        "            copy = state.copy()\n            need = self._room_for(own, {**shared, **rest})\n            del copy\n",
        f"{_BUDGET}test_500_random_prompts_stay_in_their_budget",
    ),
    Fault(
        "pages that only evicted snapshots shared are not counted",
        "fermi_engine/snapshots/cache.py",
        "while not self.holdings.reserve(need := nbytes + self.holdings.missing(shared)):",
        "need = nbytes + self.holdings.missing(shared)\n        while not self.holdings.reserve(need):",
        f"{_BUDGET}test_500_random_prompts_stay_in_their_budget",
    ),
    Fault(
        "memory that the tier reads is given away",
        "fermi_engine/snapshots/cache.py",
        "free = [entry for entry in self._tree if not entry.busy]",
        "free = list(self._tree)",
        f"{_BUDGET}test_memory_that_the_tier_still_reads_is_not_given_away",
    ),
    Fault(
        "the GPU's states are allocated without room",
        "fermi_engine/snapshots/taking.py",
        "need = sum(own[at] for at in places) + tables",
        "need = own[places[0]] + tables",
        f"{_GPU}test_room_is_made_before_states_are_allocated",
    ),
    Fault(
        "the snapshots of an aborted prompt stay",
        "fermi_engine/session.py",
        "            taking.drop()\n",
        "            taking.commit()\n",
        f"{_CPU}test_an_abort_leaves_nothing_behind",
    ),
    Fault(
        "a session goes on from its own tokens where they differ",
        "fermi_engine/session.py",
        "            and prefix.agrees(self.prefix, self.position) else 0\n",
        "            else 0\n",
        f"{_CPU}test_what_was_asked_does_not_matter",
    ),
    Fault(
        "the last token of a prompt goes another way than the others",
        "fermi_engine/gpu/choice.py",
        "1 if is_rest else 2",
        "2",
        f"{_GPU}test_short_tails_after_a_hit_go_the_same_way",
    ),
    Fault(
        "a layer's states at boundaries are fetched before it has run",
        "fermi_engine/gpu/boundaries.py",
        "        self._results.wait(self._ready[slot])\n",
        "",
        f"{_GPU}test_every_schedule_gives_the_same_states_and_a_missing_wait_does_not",
    ),
    Fault(
        "states at boundaries are taken before they have come",
        "fermi_engine/gpu/boundaries.py",
        "        self._copied[slot].synchronize()\n",
        "",
        f"{_GPU}test_every_schedule_gives_the_same_states_and_a_missing_wait_does_not",
    ),
    Fault(
        "boundaries that are needed are thinned out",
        "fermi_engine/snapshots/boundaries.py",
        "while places and after in removable and places[-1] >= reach:",
        "while places and after in removable and places[-1] >= reach - spacing:",
        f"{_PREFIX}test_thinning_keeps_the_promise_to_the_new_end",
    ),
)
