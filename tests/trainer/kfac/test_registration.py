"""Which modules of a model are layers, and what is said of the others."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.kfac.networks import EVERY_STEP, batch, small
from trainer.kfac import KFAC
from trainer.kfac.communication import _timeout_of_default_group


def test_all_layers_are_found_and_the_others_named_once(caplog):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(small(), Own())
    preconditioner = KFAC(model)
    assert preconditioner.unsupported == ["1 (Own)"]
    assert preconditioner.layers() == {"0.0": 0, "0.1": -1, "0.3": 0, "0.7": 0}
    assert [record.message for record in caplog.records] == ["K-FAC leaves the gradients of these as they are: 1 (Own)"]
    assert list(KFAC(model, skip=["BatchNorm", "^0.7$"]).layers()) == ["0.0", "0.3"]
    model[0][0].requires_grad_(False)
    assert list(KFAC(model).layers()) == ["0.1", "0.3", "0.7"]
    preconditioner, (x, y) = KFAC(model, **EVERY_STEP), batch()
    F.cross_entropy(model(x), y).backward()
    raw, weight = model[1].scale.grad.clone(), model[0][3].weight.grad.clone()
    preconditioner.step()
    assert torch.equal(model[1].scale.grad, raw) and not torch.equal(model[0][3].weight.grad, weight)
    assert set(preconditioner.cosines()) == {"0.1", "0.3", "0.7"}


def test_a_forward_of_its_own_is_left_alone():
    model = small()
    inner = model[7].forward
    model[7].forward = lambda x: 10 * inner(x)
    assert KFAC(model).unsupported == ["7 (Linear)"]


def test_names_are_those_of_the_model_itself():
    model = small()
    assert KFAC(torch.compile(model, backend="eager")).layers() == KFAC(model).layers()


def test_what_is_no_parameter_is_not_taken():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3))
    assert list(KFAC(model).layers()) == ["1"]


def test_what_learns_besides_the_layers_is_named():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class WithMore(nn.Linear):
        def __init__(self, *args):
            super().__init__(*args)
            self.more = nn.Parameter(torch.ones(()))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Scaled(4, 4), WithMore(4, 4))
    model[1].weight = model[0].weight
    preconditioner = KFAC(model)
    assert list(preconditioner.layers()) == ["3"]
    assert preconditioner.unsupported == ["0 (Linear)", "1 (Linear)", "2 (Scaled)", "3.more"]  # of tied weights, all
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    assert list(KFAC(model, skip=WithMore).layers()) == ["0", "1"]
    assert KFAC(WithMore(4, 4)).unsupported == ["more"]  # a module by itself has no name
    with pytest.raises(ValueError, match="no layer"):
        KFAC(model, skip=nn.Linear)  # with all its kinds


def test_attention_never_calls_its_projection():
    assert KFAC(nn.TransformerEncoderLayer(8, 2, 8)).unsupported == [
        "self_attn.in_proj_weight", "self_attn.in_proj_bias",
        "self_attn.out_proj (NonDynamicallyQuantizableLinear)",
    ]  # fmt: skip


@pytest.mark.parametrize("skip", ["BatchNorm", ["BatchNorm"], nn.BatchNorm2d, [nn.BatchNorm2d]])
def test_skip_by_name_or_type(skip):
    assert list(KFAC(small(), skip=skip).layers()) == ["0", "3", "7"]


def test_a_bad_pattern_is_named():
    with pytest.raises(ValueError, match=r"skip: '\(' is not a regular expression"):
        KFAC(small(), skip="(")
    with pytest.raises(ValueError, match="skip: 3 is not a regular expression and not a class"):
        KFAC(small(), skip=[3])


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"model: list is not a torch\.nn\.Module"):
        KFAC([nn.Linear(2, 2)])


def test_complex_layers_keep_their_gradients():
    assert KFAC(nn.Sequential(nn.Linear(3, 2, dtype=torch.complex64), nn.Linear(3, 2))).unsupported == ["0 (Linear)"]


def test_bare_parameters_are_named_by_themselves():
    model = nn.Sequential(nn.Linear(3, 3))
    model.token = nn.Parameter(torch.zeros(3))
    assert KFAC(model).unsupported == ["token"]


def test_layers_on_several_devices_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="its layers are on several devices: cpu, meta; allowed: one"):
        KFAC(model)


def test_sharded_parameters_are_refused(tmp_path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = fully_shard(nn.Sequential(nn.Linear(3, 2)), mesh=mesh)
        with pytest.raises(ValueError, match=r"0: its parameters are sharded \(FSDP\).*use DDP"):
            KFAC(model)
        model = nn.Sequential(nn.Linear(3, 2))
        preconditioner = KFAC(model)
        fully_shard(model, mesh=mesh)
        model(torch.randn(4, 3)).square().sum().backward()
        with pytest.raises(ValueError, match=r"0: its parameters are sharded \(FSDP\).*use DDP"):
            preconditioner.step()
    finally:
        torch.distributed.destroy_process_group()


def test_the_groups_of_collectives_have_the_time_limit_of_the_default_one(tmp_path):
    """Which the trainer sets so that it outlasts a job's suspension; torch's own for new groups is shorter."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(days=365))
        assert _timeout_of_default_group() == timedelta(days=365)
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_that_fsdp1_has_flattened_are_refused():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight._fsdp_flattened = True  # it runs on GPUs only
    with pytest.raises(ValueError, match=r"0: its parameters are sharded \(FSDP\).*use DDP"):
        KFAC(model)
