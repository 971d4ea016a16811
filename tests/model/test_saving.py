"""Folders are written completely or not at all."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer

from trundle import folders
from trundle.errors import BadInput, WriteFailed
from trundle.folders import _exchanged, _remove_abandoned, atomic_folder, check_free, write_atomic
from trundle.model.save import save, weight_bytes
from trundle.records import Lineage, read_lineage

LINEAGE = Lineage(source="somewhere", seed=4)


def test_lineage_and_card_are_inside(
    pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    folder = save(pico_model("bert"), tmp_path / "out", lineage=LINEAGE, card="# card\n")
    lineage = read_lineage(folder)
    assert lineage is not None
    assert lineage["source"] == "somewhere"
    assert lineage["versions"]["torch"]
    assert (folder / "README.md").read_text() == "# card\n"
    assert weight_bytes(folder) == (folder / "model.safetensors").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_is_overwritten_unless_asked(
    pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    for replace, reason in ((False, "already exists"), (True, "--force does not replace it")):
        with pytest.raises(BadInput, match=reason):
            check_free(tmp_path / "out", replace=replace)
        with pytest.raises(WriteFailed, match=r"complete in .*out\.new"):
            save(pico_model("bert"), tmp_path / "out", lineage=LINEAGE, card="", replace=replace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.new", "out.new2"]
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"
    (tmp_path / "out" / "modules.json").write_text("[]")
    save(pico_model("bert"), tmp_path / "out", lineage=LINEAGE, card="", replace=True)
    assert not (tmp_path / "out" / "mine.txt").exists()
    assert (tmp_path / "out" / "modules.json").exists()


def test_a_full_disk_keeps_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    (tmp_path / "out" / "config.json").write_text("{}")

    def write() -> None:
        with atomic_folder(tmp_path / "out", replace=True) as scratch:
            (scratch / "half").write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(WriteFailed, match="No space left on device"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_device_without_space(pico_model: Callable[[str], SentenceTransformer], tmp_path: Path) -> None:
    """The device is full while the library writes the weights."""

    model = pico_model("bert")
    real = SentenceTransformer.save_pretrained

    def onto_full_device(self: SentenceTransformer, path: str, **settings: object) -> None:
        (Path(path) / "model.safetensors").symlink_to("/dev/full")
        with (Path(path) / "model.safetensors").open("wb") as handle:
            handle.write(b"0" * 10_000_000)
        real(self, path, **settings)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SentenceTransformer, "save_pretrained", onto_full_device)
        with pytest.raises(WriteFailed, match="free some space"):
            save(model, tmp_path / "out", lineage=LINEAGE, card="")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_saving_leaves_no_result(tmp_path: Path) -> None:
    """SIGKILL in the middle: the target is absent, and the next save of that name removes the scratch."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom trundle.folders import atomic_folder\n"
        f"with atomic_folder({str(tmp_path / 'out')!r}) as scratch:\n"
        "    (scratch / 'half').write_text('half')\n    print('writing', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "writing"
    with atomic_folder(tmp_path / "out.v2") as scratch:
        (scratch / "whole").write_text("whole")
    (left,) = (path for path in tmp_path.iterdir() if path.name.startswith(".out."))
    _remove_abandoned(tmp_path, "out")
    assert left.exists()  # its process lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    with atomic_folder(tmp_path / "out") as scratch:
        (scratch / "whole").write_text("whole")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.v2"]


@pytest.mark.parametrize("replace", [False, True])
def test_what_appears_meanwhile_stays(tmp_path: Path, replace: bool) -> None:
    def write() -> None:
        with atomic_folder(tmp_path / "out", replace=replace, keep=True) as scratch:
            (scratch / "config.json").write_text("mine")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs.txt").write_text("precious")

    with pytest.raises(WriteFailed, match=r"the result is complete in .*out\.new"):
        write()
    assert (tmp_path / "out" / "theirs.txt").read_text() == "precious"
    assert (tmp_path / "out.new" / "config.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.new"]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("theirs", ["out", "out/theirs.txt"])
def test_what_appears_after_the_last_check_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, replace: bool
) -> None:
    check = folders.check_free

    def then_late(path: Path, **options: Any) -> None:
        check(path, **options)
        (tmp_path / theirs).parent.mkdir(exist_ok=True)
        (tmp_path / theirs).write_text("precious")

    monkeypatch.setattr(folders, "check_free", then_late)
    with (
        pytest.raises(WriteFailed, match=r"the result is complete in .*out\.new"),
        atomic_folder(tmp_path / "out", replace=replace, keep=True) as scratch,
    ):
        (scratch / "config.json").write_text("mine")
    assert (tmp_path / theirs).read_text() == "precious"
    assert (tmp_path / "out.new" / "config.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.new"]


def test_a_kill_between_two_renames_is_undone(tmp_path: Path) -> None:
    """Where names can't be exchanged, the old folder is moved aside for a moment."""
    aside = tmp_path / ".out.trundle-0123abcd.old" / "out"
    aside.mkdir(parents=True)
    (aside / "config.json").write_text("old")
    with pytest.raises(BadInput, match="stopped"), atomic_folder(tmp_path / "out"):
        raise BadInput("stopped")
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "disk" / "model" / "config.json").write_text("old")
    (tmp_path / "disk" / "page.html").write_text("old")
    for name in ("model", "page.html"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    with atomic_folder(tmp_path / "model", replace=True) as scratch:
        (scratch / "config.json").write_text("new")
    write_atomic(tmp_path / "page.html", "new")
    assert (tmp_path / "model").is_symlink()
    assert (tmp_path / "disk" / "model" / "config.json").read_text() == "new"
    assert (tmp_path / "page.html").is_symlink()
    assert (tmp_path / "disk" / "page.html").read_text() == "new"
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["model", "page.html"]


def test_what_is_written_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power loss, a name must not point to content that never reached the disk."""
    calls: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def synced(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        calls.append(f"sync {name.partition('.trundle')[0]}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda *both: (calls.append("name"), rename(*both))[1])
    monkeypatch.setattr(Path, "replace", lambda *both: (calls.append("name"), replace(*both))[1])
    write_atomic(tmp_path / "manifest.json", "{}")
    assert calls == ["sync .manifest.json", "name", f"sync {tmp_path.name}"]
    calls.clear()
    with atomic_folder(tmp_path / "out") as scratch:
        (scratch / "inner").mkdir()
        (scratch / "inner" / "weights").write_text("1")
    assert sorted(calls[:-2]) == ["sync .out", "sync inner", "sync weights"]
    assert calls[-2:] == ["name", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("by_exchange", [True, False])
def test_a_folder_is_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_exchange: bool
) -> None:
    for name in ("out", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    if by_exchange and not _exchanged(tmp_path / "out", tmp_path / "other"):
        pytest.skip("this system can't exchange two names")
    if by_exchange:
        assert (tmp_path / "other" / "config.json").exists()
        _exchanged(tmp_path / "out", tmp_path / "other")
        monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("two renames where one exchange would do"))
    else:
        monkeypatch.setattr(folders, "_exchanged", lambda *_: False)
    with atomic_folder(tmp_path / "out", replace=True) as scratch:
        (scratch / "new").write_text("new")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_a_result_has_the_users_default_permissions(
    mask: int, pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    before = os.umask(mask)
    try:
        with atomic_folder(tmp_path / "out") as scratch:
            pico_model("bert").save_pretrained(str(scratch))
    finally:
        os.umask(before)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert any(file.suffix == ".safetensors" for file in files)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mask}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask & ~0o022


def test_an_impossible_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="is a file"):
        check_free(tmp_path / "file")
    with pytest.raises(BadInput, match="no folder can be created in it"):
        check_free(tmp_path / "file" / "below")
    monkeypatch.chdir(tmp_path)
    for here in ("", ".", ".."):
        with pytest.raises(BadInput, match="choose"):
            check_free(here, replace=True)


def test_a_mount_point_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a mount point"):
        check_free("/dev", replace=True)
    command = f"mount --bind {tmp_path} {tmp_path} && {sys.executable} -c " + shlex.quote(
        f"from trundle.folders import check_free\ncheck_free({str(tmp_path)!r})"
    )
    if subprocess.run(["unshare", "-rm", "mount", "--bind", tmp_path, tmp_path], check=False).returncode:
        pytest.skip("this user can't mount")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, check=False
    )
    assert "is a mount point" in done.stderr


def test_an_output_that_can_not_be_replaced_keeps_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose folders of lower layers can't be renamed."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if tmp_path / "out" in (self, target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(self, target)

    monkeypatch.setattr(folders, "_exchanged", lambda *_: False)
    monkeypatch.setattr(Path, "rename", refused)
    with (
        pytest.raises(WriteFailed, match=r"Invalid cross-device link.*complete in .*out\.new"),
        atomic_folder(tmp_path / "out", replace=True, keep=True) as scratch,
    ):
        (scratch / "config.json").write_text("new")
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert (tmp_path / "out.new" / "config.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.new"]


def test_no_input_is_replaced(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "1_Pooling/config.json", "texts.txt"):
        (model / name).write_text("{}")
    for read in (model, model / "texts.txt", f"{model / 'texts.txt'}::text=passage", model / "1_Pooling"):
        with pytest.raises(BadInput, match="an input of this command"):
            check_free(model, replace=True, read=[str(read)])
    with pytest.raises(BadInput, match="is part of"):
        check_free(model / "1_Pooling", replace=True, read=[str(model)])
    check_free(model / "small", replace=True, read=[str(model)])
    (model / "small").mkdir()
    (model / "small" / "trundle.json").write_text("{}")
    check_free(model / "small", replace=True, read=[str(model)])


def test_lineage_of_other_folders(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) is None
    (tmp_path / "trundle.json").write_text("{")
    with pytest.raises(BadInput, match="damaged"):
        read_lineage(tmp_path)
    (tmp_path / "trundle.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(BadInput, match="another version of trundle"):
        read_lineage(tmp_path)
