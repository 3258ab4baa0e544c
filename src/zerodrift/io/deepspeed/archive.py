"""Files that `torch.save` wrote, checked before torch reads them.

Such a file is a zip, and every record in it has a CRC, which torch's reader does not compare: one bit that
turned on a disk becomes another weight. Python's reader compares it. What lies between the records decides
where torch finds them, so that must be as torch writes it, too.

Invariant: what passes `check` has the bytes that were written, or what differs is read by nobody.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

_BLOCK = 4 << 20
_MAGIC = b"PK\x03\x04"


class DamagedError(Exception):
    """What is wrong with a file, a clause."""


def check(path: Path) -> str:
    """The name that the file had when it was written, or DamagedError. Reads every byte."""
    with path.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise DamagedError(
                "no zip, which torch has written since 1.6: the older format has no checksums, and damage in "
                "it cannot be seen. If it is one of those, load it with torch and save it again"
            )
        try:
            with zipfile.ZipFile(stream) as archive:
                return _check(archive)
        except DamagedError:
            raise
        except Exception as error:
            # Damage makes `zipfile` raise nearly anything: a flag that says "encrypted" is a RuntimeError.
            raise DamagedError(f"a damaged zip ({error or type(error).__name__})") from error


def _check(archive: zipfile.ZipFile) -> str:
    records = archive.infolist()
    names = {record.filename for record in records}
    tops = {name.partition("/")[0] for name in names}
    # Python forgives what stands in front of an archive, torch does not look for it.
    if not records or len(names) < len(records) or len(tops) != 1 or min(r.header_offset for r in records):
        raise DamagedError("a zip whose list of records is damaged")
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise DamagedError(f"a damaged record `{record.filename}`")
        with archive.open(record) as stream:
            while stream.read(_BLOCK):
                pass
    return tops.pop()
