"""Which passes there are before the first step, and in which order."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from trainer.ranks.world import World
from trainer.run import rehearsal


@pytest.mark.parametrize(
    ("world_size", "compiles", "expected"),
    [
        (1, False, []),
        (1, True, ["compile 'by the compiler'"]),
        (2, False, ["pass None"]),
        (2, True, ["pass None", "compile 'by the compiler'"]),
    ],
)
def test_several_ranks_do_a_pass_that_is_not_compiled_before_they_compile(monkeypatch, world_size, compiles, expected):
    """Compiling sends no gradient, which DDP must not see first where the graph is said to be static."""
    module, done = SimpleNamespace(_compiled_call_impl="by the compiler"), []
    job = SimpleNamespace(
        world=World(world_size=world_size),
        module=module,
        train_loader=SimpleNamespace(size=16),
        recipe=SimpleNamespace(train=SimpleNamespace(compile=compiles)),
        clock=SimpleNamespace(section=nullcontext),
    )
    monkeypatch.setattr(rehearsal, "_black", lambda *_: None)
    for name in ("_pass", "_compile"):
        called = lambda *_, name=name: done.append(f"{name[1:]} {module._compiled_call_impl!r}")  # noqa: E731
        monkeypatch.setattr(rehearsal, name, called)
    rehearsal.rehearse(job)
    assert done == expected
    assert module._compiled_call_impl == "by the compiler"
