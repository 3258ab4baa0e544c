"""The digest of a checkpoint's values: what was saved is compared with what a run holds that has loaded it.

The files' checksums say that the bytes are those that were written. This says that they went to their places,
and that memory holds them.

Invariant: compared only where every value rests as it did, on whatever number of ranks and at whatever stage;
elsewhere values are converted, and others are right.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from zerodrift.engine.digest import MOMENTS, Digest
from zerodrift.errors import CheckpointError

if TYPE_CHECKING:
    from zerodrift.engine.engine import Engine

FORM = "form"
"""Beside the digests by kind: how values rest, as a checksum."""


def recorded(engine: Engine, digest: Digest) -> tuple[tuple[str, str], ...]:
    """What a manifest says of them."""
    return (FORM, _form(engine)), *digest.by_kind().items()


def require_saved(
    engine: Engine, saved: dict[str, str], digest: Digest, path: Path, *, moments: bool
) -> None:
    """Raise if values that were saved, of the model and with `moments` of the optimizer, are others here."""
    if saved.get(FORM) != _form(engine):
        return
    here = digest.by_kind()
    others = [kind for kind in here if here[kind] != saved.get(kind) and (moments or kind != MOMENTS)]
    if others:
        raise CheckpointError(
            str(path),
            "must be loaded to the bits that were saved",
            got=f"other {' and '.join(others)}, by their digest",
            do="Load it again, or an older one. If it comes again, test this machine's memory.",
        )


def _form(engine: Engine) -> str:
    text = [str(engine.updater is not None)]
    for row in engine.plan.rows:
        update = row.columns.update
        kept = "" if update is None else f"{update.master} {update.state}"
        text.append(f"{row.name} {row.columns.storage.dtype} {kept}")
    return hashlib.sha256("\n".join(text).encode(errors="surrogatepass")).hexdigest()[:16]
