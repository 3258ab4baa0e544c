"""The reference trainer: job files, data, training loop, report and tools."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.train.job_file import is_job, read_job
    from zerodrift.train.loop.session import job_to_audit, planned_from
    from zerodrift.train.loop.start import dry_run, evaluate, train
    from zerodrift.train.report.summary import preview
    from zerodrift.train.loop.run_folder import checkpoints_at, config_of
    from zerodrift.train.tools.adapters import merge
    from zerodrift.train.tools.doctor import doctor_text, examine
    from zerodrift.train.tools.replay import replay
    from zerodrift.train.tools.sample import TextGenerator, chooser

__getattr__, __dir__, __all__ = face(__name__)
