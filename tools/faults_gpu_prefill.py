"""Known faults of GPU prefill: waits left out, slots and chunks reused early or mixed up, state that is lost on the way."""

from __future__ import annotations

from tools.faults_kernels import Fault

_TESTS = "test:tests/test_gpu_prefill.py::"

GPU_PREFILL = (
    Fault(
        "experts copied into a slot that is in use",
        "fermi_engine/gpu/stream.py",
        "        self._host.lock(weights.host)\n        self._copies.wait(self._done[slot])\n",
        "        self._host.lock(weights.host)\n",
        f"{_TESTS}test_a_missing_wait_is_caught",
    ),
    Fault(
        "experts used before they are there",
        "fermi_engine/gpu/stream.py",
        "        self._compute.wait(self._filled[1][step % self.count])\n",
        "",
        f"{_TESTS}test_a_missing_wait_is_caught",
    ),
    Fault(
        "experts taken from the other slot",
        "fermi_engine/gpu/stream.py",
        "return weights.within(self._experts[step % self.count])",
        "return weights.within(self._experts[(step + 1) % self.count])",
        f"{_TESTS}test_slots_blocks_and_residence_change_no_bit",
    ),
    Fault(
        "a chunk of the ring overwritten before it is copied",
        "fermi_engine/gpu/stream.py",
        "            free.synchronize()\n",
        "",
        "test:tests/test_gpu_memory.py::test_refused_page_locks_change_no_bit_and_warn_once",
    ),
    Fault(
        "a layer's state fetched before the layer is done",
        "fermi_engine/gpu/state.py",
        "        self._stream.wait(done)\n",
        "",
        f"{_TESTS}test_a_missing_wait_is_caught",
    ),
    Fault(
        "open chunks dropped between calls",
        "fermi_engine/gpu/state.py",
        "        opened = state.current_chunks()\n",
        "        opened = None\n",
        f"{_TESTS}test_a_prompt_in_pieces_gives_the_bits_of_one",
    ),
    Fault(
        "open chunks used after the CPU has moved on",
        "fermi_engine/state.py",
        "chunks.position == self.position else None",
        "chunks.tokens else None",
        "test:tests/test_hybrid_prefill.py::test_prefill_goes_on_after_cpu_decode",
    ),
    Fault(
        "embedding rows replaced before they are copied",
        "fermi_engine/gpu/prefill.py",
        "        self.uploaded.synchronize()  # the block before is out of the staging memory\n",
        "",
        f"{_TESTS}test_blocks_give_the_same_bits_in_every_schedule",
    ),
    Fault(
        "resident weights looked for in a buffer that came later",
        "fermi_engine/gpu/prefill.py",
        "if layer in self._resident and self._resident[layer][0] is buffer:",
        "if layer in self._resident:",
        "test:tests/test_gpu_memory.py::test_weights_that_a_failed_call_pushed_out_come_back",
    ),
    Fault(
        "a ledger without a limit",
        "fermi_engine/placement.py",
        "if self.used + rounded(nbytes) > self.limit:",
        "if rounded(nbytes) > self.limit:",
        "test:tests/test_placement.py::test_the_limit_is_hard_and_the_device_is_not_asked",
    ),
)
