"""What tests of the loaders share: the backends that read by the index, and packed data sets."""

import pytest

from datapipe.names import BACKENDS


# The others have tests of their own: one streams, and the other takes images of one size only.
@pytest.fixture(params=[name for name in BACKENDS if name not in ("webdataset", "resident")])
def backend(request):
    if request.param == "dali":
        pytest.importorskip("nvidia.dali")
    return request.param


@pytest.fixture(params=["tar", "hdf5", "lmdb"])
def folder(request, packed_folders):
    return packed_folders[request.param] / "train"  # 61 images
