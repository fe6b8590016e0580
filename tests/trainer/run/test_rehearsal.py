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
        (1, True, ["compiled reduce-overhead", "compile"]),
        (2, False, ["pass"]),
        (2, True, ["pass", "compiled reduce-overhead", "compile"]),
    ],
)
def test_several_ranks_do_a_pass_that_is_not_compiled_before_they_compile(monkeypatch, world_size, compiles, expected):
    """Compiling sends no gradient, which DDP must not see first where the graph is said to be static."""
    done = []
    module = SimpleNamespace(compile=lambda mode: done.append(f"compiled {mode}"))
    job = SimpleNamespace(
        world=World(world_size=world_size),
        module=module,
        train_loader=SimpleNamespace(size=16),
        recipe=SimpleNamespace(train=SimpleNamespace(compile=compiles, compile_mode="reduce-overhead")),
        clock=SimpleNamespace(section=nullcontext),
    )
    monkeypatch.setattr(rehearsal, "_black", lambda *_: None)
    for name in ("_pass", "_compile"):
        monkeypatch.setattr(rehearsal, name, lambda *_, name=name: done.append(name[1:]))
    rehearsal.rehearse(job)
    assert done == expected
