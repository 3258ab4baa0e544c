"""Compile the CPU kernels into the wheel where a compiler is there; everything else is in pyproject.toml.

A wheel with kernels is for one platform and any Python: the libraries are loaded through ctypes. Without a
compiler, and for an editable install, the wheel has none, and they are compiled on first use instead.
"""

import importlib.util
import platform
import re
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("zerodrift", "kernels")


def build_module():
    """Load `kernels/build.py` by itself: importing the package would ask for torch."""
    spec = importlib.util.spec_from_file_location("kernels_build", Path("src", KERNELS, "build.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Copy the package, and compile the kernels beside it."""

    libraries = ()

    def run(self):
        super().run()
        build = build_module()
        compiler = build.find_compiler()
        if self.editable_mode or compiler is None or sys.platform != "linux":
            return
        try:
            self.libraries = list(
                build.compile_variants(compiler, Path(self.build_lib, KERNELS, "libraries"))
            )
        except build.BuildError as error:
            print(f"zerodrift: {error}; this wheel has no kernels, they are compiled on first use")


class WheelOfPlatform(bdist_wheel):
    """Name the wheel after what was compiled into it."""

    def get_tag(self):
        libraries = self.get_finalized_command("build_py").libraries
        return "py3", "none", platform_tag(libraries) if libraries else "any"


class DistributionWithLibraries(Distribution):
    """Install where a platform's files belong, as a distribution with extension modules."""

    def has_ext_modules(self):
        return True


def platform_tag(libraries):
    """Return the oldest manylinux tag that has all symbols of glibc that the libraries name."""
    machine = platform.machine()
    if platform.libc_ver()[0] != "glibc":
        return f"linux_{machine}"
    minors = (re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes()) for path in libraries)
    return f"manylinux_2_{max(17, *(int(minor) for found in minors for minor in found))}_{machine}"


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfPlatform},
    distclass=DistributionWithLibraries,
)
