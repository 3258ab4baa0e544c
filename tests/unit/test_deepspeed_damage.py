"""A damaged DeepSpeed checkpoint gives the saved values, or one error."""

from __future__ import annotations

import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.deepspeed_layout import lay_out, values
from zerodrift.errors import ZerodriftError
from zerodrift.weights.deepspeed.checkpoint import open_deepspeed

FLIPS = 24
"""Number of single flipped bits, at each stage."""


def read_all(folder: Path) -> dict[str, Any]:
    """Return all values that a reader gets from a checkpoint."""
    found = open_deepspeed(folder)
    keys = [(entry, key) for entry in found.entries for key in ("", *entry.moments)]
    tensors = {f"{key} {entry.name}": found.whole(entry, key).tolist() for entry, key in keys}
    return {"tensors": tensors, "rest": repr((found.kind, found.trained))}


def outcome(folder: Path) -> dict[str, Any] | None:
    """Return the values that are read, or None for one error of ours; other errors are failures."""
    try:
        return read_all(folder)
    except ZerodriftError:
        return None


@pytest.fixture(scope="module", params=[2, 3], ids=lambda stage: f"stage {stage}")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    place = tmp_path_factory.mktemp("whole") / "run"
    return request.param, lay_out(place, request.param)


@pytest.fixture
def copy(whole: tuple[int, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[1], tmp_path / "run"))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("global_step*/*.pt"))


def test_what_is_whole_is_read(whole: tuple[int, Path]) -> None:
    found = open_deepspeed(whole[1])
    for seed, key in enumerate(("", "exp_avg")):
        whole_values = {entry.name: found.whole(entry, key) for entry in found.entries}
        torch.testing.assert_close(whole_values, values(seed), rtol=0, atol=0)
    assert found.trained and found.trained.step == found.trained.updates == 3


def test_no_bit_can_change_a_value_unseen(copy: Path) -> None:
    right, draw = read_all(copy), random.Random(0)
    refused = 0
    for _ in range(FLIPS):
        path = draw.choice(files(copy))
        good = path.read_bytes()
        # Values are few bytes of a file, and so are the lists of records at the end.
        with zipfile.ZipFile(path) as archive:
            tensors = [record for record in archive.infolist() if "/data/" in record.filename]
        places = [draw.randrange(len(good)), len(good) - 1 - draw.randrange(1200)]
        for record in tensors:
            names = struct.unpack_from("<HH", good, record.header_offset + 26)
            places.append(record.header_offset + 30 + sum(names) + draw.randrange(record.file_size))
        place = draw.choice(places)
        data = bytearray(good)
        data[place] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        found = outcome(copy)
        assert found in (None, right), f"byte {place} of {path.name}"
        refused += found is None
        path.write_bytes(good)
    assert refused > FLIPS // 3


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "cut by a byte": lambda data: data[:-1],
    "a page of zeros": lambda data: data[: (half := len(data) // 2)] + b"\0" * 512 + data[half + 512 :],
    "twice": lambda data: data + data,
    "something else": lambda data: b"not a checkpoint",
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_whatever_happened_to_a_file_is_seen(harm: Callable[[bytes], bytes], copy: Path) -> None:
    right = read_all(copy)
    for path in files(copy):
        good = path.read_bytes()
        path.write_bytes(harm(good))
        assert outcome(copy) in (None, right), path.name
        path.write_bytes(good)


def other(copy: Path, **changes: Any) -> Path:
    """Write another save of the same run beside it."""
    stage = 3 if len(files(copy)) == 4 else 2
    return lay_out(copy.parent / "other", stage, **changes)


def swap(copy: Path) -> None:
    one, two = sorted(copy.glob("global_step*/*optim_states.pt"))
    second = two.read_bytes()
    two.write_bytes(one.read_bytes())
    one.write_bytes(second)


def lose_a_rank(copy: Path) -> None:
    for path in copy.glob("global_step*/*rank_1*"):
        path.unlink()


def an_optimizer_of_later_steps(copy: Path) -> None:
    for path in (other(copy, step=9) / "global_step9").glob("*optim*"):
        shutil.copy(path, copy / "global_step3")


def a_shorter_moment(copy: Path) -> None:
    path = next(copy.glob("global_step*/*rank_1*optim*"))
    state = torch.load(path, weights_only=False)
    own = state["optimizer_state_dict"]
    moments = own.get("base_optimizer_state", own.get("optimizer_state_dict"))["state"][0]
    moments["exp_avg"] = moments["exp_avg"][:-9]
    torch.save(state, path)


@pytest.mark.parametrize(
    ("harm", "said_of_it"),
    [
        (a_shorter_moment, "elements for exp_avg of `2.weight`"),
        (swap, "must be the file that was saved under its name"),
        (lose_a_rank, "of each of 2 ranks"),
        (an_optimizer_of_later_steps, "must have an optimizer of at most 3 steps"),
    ],
)
def test_files_that_do_not_belong_together(harm: Any, said_of_it: str, copy: Path) -> None:
    harm(copy)
    with pytest.raises(ZerodriftError, match=said_of_it):
        read_all(copy)


def test_a_file_of_another_step(copy: Path) -> None:
    """Every file is replaced in turn, by one with other masters or the same."""
    for seed in (0, 5):
        later = other(copy, step=4, seed=seed)
        for path in files(copy):
            good = path.read_bytes()
            path.write_bytes((later / "global_step4" / path.name).read_bytes())
            if path.name.startswith("mp_rank") and not seed:
                # As good as a run whose optimizer was made anew on the way, so it is said, not refused.
                assert "counted 3 of 4 steps" in open_deepspeed(copy).notes[0]
            else:
                with pytest.raises(ZerodriftError, match=r"one save|must have masters"):
                    read_all(copy)
            path.write_bytes(good)
        shutil.rmtree(later)


def test_files_without_checksums_are_refused_by_name(tmp_path: Path) -> None:
    """torch wrote this format before zips."""
    with pytest.raises(ZerodriftError, match="the older format has no checksums"):
        read_all(lay_out(tmp_path / "run", 2, archive=False))
