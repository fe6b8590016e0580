"""What pyproject.toml cannot say: the decoder in C, which is left out where nothing compiles it."""

import platform
from glob import glob

from setuptools import Extension, setup

# -fno-wrapv: Python is compiled with -fwrapv, and would hand it on, with which loops are vectorised less well.
FLAGS = ["-std=c11", "-O3", "-fno-wrapv", "-ffp-contract=off", "-fvisibility=hidden"]
AVX2 = ["-mavx2", "-mbmi", "-mbmi2"]
NEON = ["-DDATAPIPE_NEON", "-fwrapv"]  # sums of vectors wrap, and arm_neon.h adds them as if they did not


def library(name: str, *flags: str) -> Extension:
    return Extension(
        f"datapipe.native._{name}",
        sorted(glob("datapipe/native/*.c")),
        depends=sorted(glob("datapipe/native/*.h")),
        extra_compile_args=[*FLAGS, *flags],
        libraries=["m"],
        optional=True,
    )


libraries = [library("plain")]
if platform.machine() in ("x86_64", "AMD64"):
    libraries.append(library("avx2", *AVX2))
elif platform.machine() in ("aarch64", "arm64"):
    libraries.append(library("neon", *NEON))
setup(ext_modules=libraries)
