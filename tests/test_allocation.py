"""The command keeps the memory that a step frees; the library alone does not touch the process's
allocator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from zetaclip.cli import allocation

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc has these settings"
)

_FAULTS = """
import resource, sys
from zetaclip.cli.allocation import keep_freed_memory
import torch

torch.set_num_threads(1)
if "keep" in sys.argv:
    assert keep_freed_memory()
for turn in range(40):
    if turn == 20:  # glibc may have set aside up to seven blocks by now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12 * 2**20)  # 48 MiB: every page is written to, and freed
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(*words: str, **settings: str) -> int:
    environment = {
        name: value for name, value in os.environ.items() if name not in allocation._OWN_SETTINGS
    }
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS, *words],
        env={**environment, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@glibc
def test_freed_memory_comes_back_without_page_faults() -> None:
    pages = 48 * 2**20 // os.sysconf("SC_PAGESIZE")
    kept, given_back = _faults("keep"), _faults()
    if given_back < 20 * pages // 2:
        pytest.skip("pages are larger here (transparent huge pages): there is little to save")
    # Of twenty turns. Should something small come to lie in the freed block, one turn gets a new
    # one; it mostly does before turn 20.
    assert kept <= pages


@glibc
@pytest.mark.parametrize("name", allocation._OWN_SETTINGS)
def test_settings_in_the_environment_win(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(
        name, "1000000" if name.startswith("MALLOC") else "glibc.malloc.trim_threshold=1000000"
    )
    assert not allocation.keep_freed_memory()


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation.sys, "platform", "darwin")
    assert not allocation.keep_freed_memory()
