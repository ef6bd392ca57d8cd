"""Faults of the model that lives on the GPU: its timeline, its memory, a token's launches (tools/faults.py)."""

from __future__ import annotations

from tools.faults_kernels import Fault

_BITS, _MEMORY, _SESSION, _SNAPSHOTS = (
    f"test:tests/test_resident{name}.py::" for name in ("", "_memory", "_session", "_snapshots"))
_CPU = f"{_BITS}test_prefill_and_decode_are_the_cpus_within_its_noise"
_RESTORED = f"{_BITS}test_a_restored_state_goes_on_as_if_nothing_had_been"
_FILE, _TOKEN = "fermi_engine/gpu/resident.py", "fermi_engine/model/gpu_token.py"

RESIDENT = (
    Fault("prefill after decode goes on from the chunk before", _FILE, "        if self._is_open:\n            return\n",
          "        return\n", _RESTORED),
    Fault("a restored state decodes from zero", _FILE, "mine.final.upload(self.device, host.recurrent, self.compute)", "pass",
          _RESTORED),
    Fault("chunks that are open are not fetched", _FILE, "if deltas and self._is_open else 0", "if False else 0", _RESTORED),
    Fault("chunks that were left are fetched", _FILE, "self._position + 1, False", "self._position + 1, self._is_open",
          _CPU),
    Fault("one timeline taken for another", _FILE, "self._owner() is state and", "True and",
          f"{_BITS}test_states_take_turns_on_the_device"),
    Fault("a host that has moved on is not looked at", _FILE, " and state.position == self._fetched", "",
          f"{_BITS}test_a_host_that_has_moved_on_is_taken_up"),
    Fault("the timeline that makes room is thrown away", _FILE, "            self.fetch(owner)\n", "            pass\n",
          f"{_BITS}test_states_take_turns_on_the_device"),
    Fault("a token stands one place late", _FILE, "token, self._position, *[self._position + shift]",
          "token, self._position + 1, *[self._position + 1 + shift]", _CPU),
    Fault("logits of a block's first token", _FILE, "self._logits(block, block.tokens - 1)", "self._logits(block, 0)", _CPU),
    Fault("norm before the head left out", _TOKEN, 'ends["norm"], c.rms_norm_eps', "None, c.rms_norm_eps", _CPU),
    Fault("gate and up exchanged, one token", _TOKEN, 'w["gate_proj"], w["up_proj"]', 'w["up_proj"], w["gate_proj"]', _CPU),
    Fault("the attention's residual forgotten", _TOKEN, '[(w["o_proj"], self["x"])], add=True', '[(w["o_proj"], self["x"])]',
          _CPU),
    Fault("the delta rule's query unscaled", _TOKEN, "1.0 / math.sqrt(c.linear_key_head_dim)", "1.0", _CPU),
    Fault("the cache grows without its content", _FILE, "        self._evict()\n        for buffer", "        for buffer",
          f"{_MEMORY}test_the_cache_grows_and_changes_no_bit"),
    Fault("a timeline survives its failure", _FILE, "            self._owner = None\n            with suppress",
          "            with suppress", f"{_MEMORY}test_an_interrupt_leaves_the_device_usable"),
    Fault("states inside a prefill counted from where the host stood", _FILE,
          "            if stops is not None:\n                self.fetch(state)\n            self._open_chunks()\n",
          "            self._open_chunks()\n",
          f"{_SNAPSHOTS}test_states_left_behind_decoded_tokens_go_on_as_if_nothing_had_been"),
    Fault("states inside a prefill beyond the memory", _FILE,
          "if rounded(gpu_boundaries.device_bytes(self.config, places)) <= left", "if True",
          f"{_SNAPSHOTS}test_where_memory_is_short_states_are_fewer_and_logits_the_same"),
    Fault("memory of states inside a prefill kept", _FILE, "        with self.ledger.scope():\n            buffer",
          "        with self.ledger.scope(only_after_errors=True):\n            buffer",
          f"{_SNAPSHOTS}test_where_memory_is_short_states_are_fewer_and_logits_the_same"),
    Fault("a block of prefill beyond the memory", _FILE, "if rounded(Activations(self.config, most).nbytes) <= left", "if True",
          f"{_BITS}test_blocks_of_a_prefill_and_little_memory_change_no_bit"),
    Fault("launches run when they are recorded, too", "fermi_engine/kernels/checked_device.py",
          "            self._recording.rows.append(row)\n            return\n", "            self._recording.rows.append(row)\n",
          "test:tests/test_device.py::test_what_is_recorded_runs_when_it_is_replayed"),
    Fault("a snapshot of what the host remembers", "fermi_engine/session.py", "self.engine.resident.fetch(state)", "pass",
          f"{_SESSION}test_a_snapshot_goes_on_as_its_session_does"),
    Fault("memory is refused half way", "fermi_engine/session.py", "resident.admit(state, len(ids), is_prefill)", "pass",
          f"{_SESSION}test_what_does_not_fit_leaves_the_session_whole"),
    Fault("a session that begins anew goes on where the device stands", "fermi_engine/session.py",
          "            self.engine.resident.forget(self._state)\n", "            pass\n",
          f"{_SESSION}test_a_prompt_from_its_first_token"),
    Fault("an answer is kept as the host remembers it", "fermi_engine/session.py", "cache.save(self.state, self.prefix",
          "cache.save(self._state, self.prefix", f"{_SESSION}test_prompts_go_on_from_snapshots"),
    Fault("one more token of a prompt is decoded", "fermi_engine/session.py",
          "is_prompt or images is not None or len(ids) > 1, images)", "len(ids) > 1, images)",
          f"{_SESSION}test_a_prompt_one_token_longer"),
    Fault("states of both ways of decoding mix", "fermi_engine/snapshots/prefix.py",
          '"resident" if options.decode == "gpu" else', "",
          f"{_SESSION}test_states_of_the_cpu_are_refused"),
)
