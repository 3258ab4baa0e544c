"""Checkpoints of a run: saved atomically, verified, inspected, and loaded onto any number of ranks."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.checkpoint import state
    from zerodrift.checkpoint.checkpoints import Checkpoints, Loaded, Part
    from zerodrift.checkpoint.contents import VERSIONS
    from zerodrift.checkpoint.differences import Allowed
    from zerodrift.checkpoint.files import (
        FULL, Lock, NewFolder, free, full_disk_named, is_folder, kind_at, list_folder, new_file, new_folder,
        short, unwritable, writing,
    )  # fmt: skip
    from zerodrift.checkpoint.folder import (
        CheckpointFolder, DEEPSPEED, LATEST, automatic, has_deepspeed_files, is_deepspeed, read_latest,
    )  # fmt: skip
    from zerodrift.checkpoint.inspection import inspect, inspection_json, inspection_text
    from zerodrift.checkpoint.manifest import (
        MANIFEST, Manifest, SHARED, SavedParameter, read_entries, read_manifest, read_plan, state_file,
        verified,
    )  # fmt: skip
    from zerodrift.checkpoint.save import Head, everywhere, on_rank_0, write_head, write_rank_files
    from zerodrift.checkpoint.state import (
        groups, packed, persistent_buffers, put_groups, put_scale, read_state,
    )  # fmt: skip
    from zerodrift.checkpoint.tensors import (
        CHUNK, CheckpointReader, Item, moment_key, weight_key,
    )  # fmt: skip

__getattr__, __dir__, __all__ = face(__name__)
