"""`deepspeed.git_version_info`: there is no build, so there is nothing to tell of one."""

from zerodrift.deepspeed.ops.op_builder import ALL_OPS
from zerodrift.versions import DEEPSPEED

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "version"]

version = DEEPSPEED
git_hash = git_branch = "unknown"
installed_ops = dict.fromkeys(ALL_OPS, False)
compatible_ops = {name: builder().is_compatible() for name, builder in ALL_OPS.items()}
