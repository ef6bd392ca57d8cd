"""Known faults of snapshots on disk and of named sessions: bytes not proven, files half written, others' states taken, names that
lead elsewhere, room that is not there.

A rename that overtakes its data when the power fails cannot be tried on a running machine: the guard of that fault checks the
order of the calls.
"""

from __future__ import annotations

from tools.faults_kernels import Fault

_FILE, _SEALED = "test:tests/test_snapshot_files.py::", "test:tests/test_sealed_file.py::"
_DISK, _NAMED = "test:tests/test_snapshot_disk.py::", "test:tests/test_named_session.py::"

SNAPSHOT_DISK = (
    Fault(
        "a tensor's digest not compared",
        "fermi_engine/snapshots/sealed_file.py",
        "        if digest.digest() != self._digests[t.name]:\n",
        "        if False:\n",
        f"{_SEALED}test_a_wrong_byte_anywhere_is_noticed",
    ),
    Fault(
        "a header's digest not compared",
        "fermi_engine/snapshots/sealed_file.py",
        "        if last != seal_digest(raw, digests):\n",
        "        if False:\n",
        f"{_SEALED}test_a_wrong_byte_anywhere_is_noticed",
    ),
    Fault(
        "a link followed out of the directory",
        "fermi_engine/snapshots/sealed_file.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        f"{_SEALED}test_only_regular_files_are_opened",
    ),
    Fault(
        "a file under its own name before it is whole",
        "fermi_engine/snapshots/directory.py",
        '    part = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}.fermi-snapshot-part")\n',
        "    part = path\n",
        f"{_DISK}test_kill_9_at_random_moments_of_saving",
    ),
    Fault(
        "a file named before it is on disk",
        "fermi_engine/snapshots/directory.py",
        "        write(fd)\n        os.fsync(fd)\n",
        "        write(fd)\n",
        f"{_DISK}test_the_file_is_on_disk_before_it_has_its_name",
    ),
    Fault(
        "a file removed that another process is writing",
        "fermi_engine/snapshots/directory.py",
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n        os.unlink(entry.path)\n",
        "        os.unlink(entry.path)\n",
        f"{_DISK}test_only_own_files_that_nobody_holds_are_cleared",
    ),
    Fault(
        "the budget checked after writing",
        "fermi_engine/snapshots/disk.py",
        "snapshot_directory.used_bytes(self.directory) + nbytes - self.budget",
        "snapshot_directory.used_bytes(self.directory) - self.budget",
        f"{_DISK}test_the_budget_holds_at_every_instant",
    ),
    Fault(
        "files on their way not counted",
        "fermi_engine/snapshots/directory.py",
        "            if not (is_part or entry.name.endswith(SUFFIX)):\n",
        "            if not entry.name.endswith(SUFFIX):\n",
        f"{_DISK}test_a_file_that_another_process_is_writing_counts",
    ),
    Fault(
        "roots removed for room as any other",
        "fermi_engine/snapshots/disk.py",
        '(item[1].info.kind == "root", item[1].stamp[2])',
        "item[1].stamp[2]",
        f"{_DISK}test_roots_and_what_was_used_lately_stay",
    ),
    Fault(
        "tokens not compared with the file's",
        "fermi_engine/snapshots/disk.py",
        " or not snapshot.prefix.agrees(prefix, stored.position):",
        ":",
        f"{_DISK}test_tokens_are_compared_and_not_only_their_digest",
    ),
    Fault(
        "a damaged file named again and again",
        "fermi_engine/snapshots/disk.py",
        "replace(self._entries[name], info=None)",
        "self._entries[name]",
        f"{_DISK}test_a_wrong_byte_is_noticed_before_the_state_is_used",
    ),
    Fault(
        "memory of a snapshot that was not taken never given back",
        "fermi_engine/background.py",
        "        if not is_taken:\n            done()\n",
        "",
        f"{_DISK}test_no_more_bytes_wait_than_the_queue_may_hold",
    ),
    Fault(
        "a snapshot of another pack taken",
        "fermi_engine/snapshots/files.py",
        '("pack_hash", "pack"), ',
        "",
        f"{_FILE}test_a_snapshot_of_something_else_is_refused",
    ),
    Fault(
        "keys and values in the order of pages",
        "fermi_engine/snapshots/files.py",
        "        for head in range(self.cache.kv_heads):\n            for page in range(self.cache.pages_for(self.length)):\n",
        "        for page in range(self.cache.pages_for(self.length)):\n            for head in range(self.cache.kv_heads):\n",
        f"{_FILE}test_every_byte_comes_back_whatever_the_page_size",
    ),
    Fault(
        "an open chunk left out of the file",
        "fermi_engine/snapshots/files.py",
        "    chunks = state.current_chunks()\n    for i, arrays",
        "    chunks = None\n    for i, arrays",
        f"{_FILE}test_an_open_chunk_of_gpu_prefill_comes_back",
    ),
    Fault(
        "an open chunk taken for that of another position",
        "fermi_engine/snapshots/files.py",
        "OpenChunks(info.position, tokens, layers)",
        "OpenChunks(info.position - 1, tokens, layers)",
        f"{_FILE}test_an_open_chunk_of_gpu_prefill_comes_back",
    ),
    Fault(
        "room made for fewer bytes than a snapshot takes",
        "fermi_engine/snapshots/files.py",
        "row * (pages * kv_block - info.position) + tables",
        "tables",
        f"{_FILE}test_the_memory_of_a_loaded_snapshot_is_known_before",
    ),
    Fault(
        "any text taken as a session's name",
        "fermi_engine/snapshots/named_session.py",
        "    if NAME.fullmatch(name) is None:\n",
        "    if not name:\n",
        f"{_NAMED}test_a_name_cannot_leave_the_directory",
    ),
    Fault(
        "a session of another model continued",
        "fermi_engine/snapshots/named_session.py",
        "        if its != mine:\n",
        "        if False:\n",
        f"{_NAMED}test_a_session_of_another_model_is_refused",
    ),
    Fault(
        "a session continued by two processes at once",
        "fermi_engine/snapshots/named_session.py",
        "            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            pass\n",
        f"{_NAMED}test_a_session_is_one_processs_at_a_time",
    ),
    Fault(
        "the last token of an answer dropped from its session",
        "fermi_engine/conversation.py",
        "        self.ids, self.shown, self._waiting = [*ids, *writer.ids], shown, []\n",
        "        self.ids, self.shown, self._waiting = [*ids, *writer.ids[:-1]], shown, []\n",
        f"{_NAMED}test_token_ids_go_on_in_another_run",
    ),
    Fault(
        "logits left out of a session",
        "fermi_engine/conversation.py",
        "logits=self.timeline.logits, kind",
        "kind",
        f"{_NAMED}test_a_finished_answer_repeats_its_end_without_evaluating_anything",
    ),
)
