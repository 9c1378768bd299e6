"""The rooms of the house: each imports only rooms above it, and nothing imports in a circle."""

import ast
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zetaclip

ROOT = Path(zetaclip.__file__).parent

# From the ground up: a room may import from rooms of earlier lines, and from itself.
FLOORS = [
    {"_pooling", "errors", "files", "grid", "metrics", "threads", "words"},
    {"randomness", "spectrum"},
    {"ledger", "gradients"},
    {"accounting", "control", "losses"},
    {"clipping"},
    {"mechanism", "methods"},
    {"engine", "optim"},
    {"data"},
    {"features", "models"},
    {"training"},
    {"audit", "inference", "integrations", "experiments"},
    {"report", "sklearn"},
    {"cli"},
    {"__main__", "__init__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules():
    """Every module by its dotted name inside the package."""
    found = {}
    for path in (*ROOT.rglob("*.pyi"), *ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imported(name, path, known):
    """What a module imports of the package, also inside functions and for types alone."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (
                one.name.removeprefix("zetaclip.")
                for one in node.names
                if one.name.startswith("zetaclip.")
            )
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] if name != "__init__" else []
                base = [*base, *(node.module or "").split(".")]
            elif (node.module or "").split(".")[0] == "zetaclip":
                base = node.module.split(".")[1:]
            else:
                continue
            base = ".".join(part for part in base if part)
            for one in node.names:
                full = f"{base}.{one.name}".strip(".")
                yield full if full in known else base or "__init__"


GRAPH = {name: set(imported(name, path, modules())) - {name} for name, path in modules().items()}


def room(name):
    return name.split(".")[0]


def test_every_room_has_its_floor():
    assert {room(name) for name in GRAPH} == set(FLOOR)


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_a_room_imports_only_rooms_above_it(name):
    if name == "__init__":  # the public face names everything
        return
    for other in GRAPH[name]:
        assert (
            room(other) == room(name)
            or FLOOR[room(other)] < FLOOR[room(name)]
            or other == "__init__"
        ), f"{name} imports {other}"


def circles(graph):
    """Every set of modules that import each other, by depth-first search."""
    order, stack, place, low, found = [0], [], {}, {}, []

    def visit(name):
        place[name] = low[name] = order[0] = order[0] + 1
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in place:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], place[other])
        if low[name] == place[name]:
            group = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in place:
            visit(name)
    return found


def test_nothing_imports_in_a_circle():
    graph = {name: others - {"__init__"} for name, others in GRAPH.items() if name != "__init__"}
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c"]]  # the test can fail


def crossings(work):
    """The calls from one module of the package into another while ``work`` runs."""
    known = {str(path): name for name, path in modules().items()}
    found = []

    def look(frame, event, arg):
        here = known.get(frame.f_code.co_filename) if event == "call" else None
        if here is None:
            return
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename not in known:
            caller = caller.f_back
        origin = "user" if caller is None else known[caller.f_code.co_filename]
        if origin != here:
            found.append((origin, here, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def test_one_step_crosses_between_modules_60_times_or_less(monkeypatch):
    """As docs/architecture.md says. It is the path that a reader of the code has to follow."""
    # Runs of other tests that were not collected yet look at every backward too.
    monkeypatch.setattr("zetaclip.engine._loss_check._CHECKS", weakref.WeakSet())
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(400, 8), torch.randint(0, 3, (400,)))
    model, optimizer, loader = zetaclip.PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=40),
        noise_multiplier=1.0,
        clipping=zetaclip.Spectral(probe="0", period=1),
        sample_rate=0.1,
        num_examples=400,
    )
    batches = iter(loader)

    def step():
        inputs, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    step()
    found = crossings(step)
    assert 20 < len(found) <= 60, "\n".join(f"{a} -> {b}.{name}" for a, b, name in found)
