"""What a method becomes when its own part is switched off: DP-SGD, or torch's optimizer, or the
textbook's SAM."""

import copy

import pytest
import torch
from helpers import flat, looped_gradients, mean_loss, private, tiny, toy_data, train

from zetaclip import methods
from zetaclip.control import ClipState, Controller, Replay, Spectral
from zetaclip.methods import get
from zetaclip.randomness import normals


def run(
    method,
    *,
    sigma=1.1,
    steps=6,
    lr=0.3,
    q=0.5,
    data=None,
    module=None,
    torch_options=None,
    **options,
):
    """Weights after some updates with a fixed seed, and every gradient that the optimizer got."""
    method = get(*method[:1], **method[1]) if isinstance(method, tuple) else method
    module = tiny() if module is None else module
    optimizer = method.optimizer(module.parameters(), lr=lr, **(torch_options or {}))
    options = {"epochs": 8, "target_delta": 1e-5, "clipping": None, **options}
    _, module, optimizer, loader = private(
        module, data or toy_data(), method=method, optimizer=optimizer, sigma=sigma, q=q, **options
    )
    gradients = []
    while len(gradients) < steps:
        train(module, optimizer, loader, steps=1)
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    return flat(module), torch.stack(gradients)


def remaining(z, sigma_b):
    return (z**-2 - (2 * sigma_b) ** -2) ** -0.5


TO_DP_SGD = {
    "ww without gain": ("ww-dp-sgd", {"gain": 0.0, "probe": "0", "period": 1, "bounds": None}),
    "sat without rho": ("dp-sat", {"rho": 0.0}),
    "slaclip without gain": ("slaclip", {"gain": 0.0}),
    "adaclip without a map": ("adaclip", {"adapt": False}),
    "adadpigu that keeps all": ("adadpigu", {"keep": 1.0, "whiten": False}),
}


@pytest.mark.parametrize("name", list(TO_DP_SGD))
def test_equals_dp_sgd_bit_for_bit(name):
    assert torch.equal(run(TO_DP_SGD[name])[0], run(("dp-sgd", {}))[0])


@pytest.mark.parametrize("method", ["quantile", "bounded-adaptive"])
def test_a_count_that_moves_nothing_leaves_dp_sgd_with_the_sums_own_noise(method):
    """C_lb = C_ub does the same as a gain of 0; normalised, the step is divided by C."""
    options = {"clip": 0.5, "sigma_b": 2.0}
    options |= (
        {"gain": 0.0} if method == "quantile" else {"lower": 0.5, "upper": 0.5, "normalised": False}
    )
    reference = run(("dp-sgd", {"clip": 0.5}), sigma=remaining(1.1, 2.0))[0]
    assert torch.equal(run((method, options))[0], reference)
    if method == "bounded-adaptive":
        normalised = run((method, {**options, "normalised": True}), lr=0.3 * 0.5)[0]
        torch.testing.assert_close(normalised, reference, rtol=1e-5, atol=1e-6)


def test_no_decay_is_dp_adamw_and_without_weight_decay_dp_adam():
    plain = run(("dp-adamw", {"weight_decay": 0.0}), lr=0.01)[0]
    assert torch.equal(run(("adp-adamw", {"ratio": 1.0, "weight_decay": 0.0}), lr=0.01)[0], plain)
    assert torch.equal(run(("dp-adam", {}), lr=0.01)[0], plain)
    assert not torch.equal(run(("dp-adamw", {"weight_decay": 0.1}), lr=0.01)[0], plain)


def test_dp_adam_ac_that_paces_nothing_is_dp_adamw():
    still = {"clip": 0.5, "gain": 0.0, "up": 1.0, "down": 1.0, "sigma_b": 2.0}
    reference = run(("dp-adamw", {"clip": 0.5}), sigma=remaining(1.1, 2.0), lr=0.01)[0]
    assert torch.equal(run(("dp-adam-ac", still), lr=0.01)[0], reference)


def test_dp_is_where_every_gradient_is_long_is_dp_sgd():
    """Every norm is at least C: every candidate joins."""
    assert torch.equal(run(("dp-is", {"clip": 1e-4}))[0], run(("dp-sgd", {"clip": 1e-4}))[0])
    assert not torch.equal(run(("dp-is", {"clip": 10.0}))[0], run(("dp-sgd", {"clip": 10.0}))[0])


@pytest.mark.parametrize("batch", ["fresh", "same"])
def test_sam_without_rho_is_dp_sgd_given_the_same_noise(batch, monkeypatch):
    """Each descent gradient, from the examples one at a time and the noise that its key gives."""
    from zetaclip.mechanism import Mechanism

    seen, release = [], Mechanism.release

    def spy(self, *args):
        released = release(self, *args)
        seen.append((self.draw, released))
        return released

    monkeypatch.setattr(Mechanism, "release", spy)
    module = tiny()
    start = copy.deepcopy(module)
    data = toy_data()
    run(("dp-sam", {"rho": 0.0, "ascent_batch": batch}), q=1.0, steps=1, module=module, data=data)
    (_, _), (draw, released) = seen
    loop = looped_gradients(start, data, mean_loss)
    total = (loop * (1 / loop.norm(dim=1, keepdim=True).clamp_min(1))).sum(0)
    noise = (
        torch.from_numpy(normals(draw.sum_key, len(total))).float()
        * draw.noise_multiplier
        * (1 + 2**-9)
    )
    torch.testing.assert_close(released.gradient, (total + noise) / 24, rtol=1e-4, atol=1e-6)


# -- no noise, no clipping, every record: the optimizers that people know --------------------------


def reference(optimizer, steps=6, module=None):
    module = tiny(dtype=torch.float64) if module is None else module
    made = optimizer(module.parameters())
    data = toy_data(dtype=torch.float64)
    for _ in range(steps):
        made.zero_grad()
        mean_loss(module, data).backward()
        made.step()
    return flat(module)


EXACT = {"sigma": 0.0, "q": 1.0}
PLAIN = {
    "dp-sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "dp-adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "dp-adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "dp-adam-bc": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.0),
    "dp-sat": None,
    "quantile": lambda p: torch.optim.SGD(p, lr=0.3),
    "slaclip": lambda p: torch.optim.SGD(p, lr=0.3),
    "ww-dp-sgd": lambda p: torch.optim.SGD(p, lr=0.3),
}


@pytest.mark.parametrize("name", [name for name, made in PLAIN.items() if made])
def test_without_noise_and_clipping_it_is_torchs_own(name):
    options = {"clip": 1e6}
    options |= {"bounds": (1e5, 1e7)} if name in ("quantile", "slaclip") else {}
    options |= {"floor": 0.0} if name == "dp-adam-bc" else {}
    options |= {"probe": "0", "bounds": None} if name == "ww-dp-sgd" else {}
    lr = 0.01 if "adam" in name else 0.3
    found, _ = run(
        (name, options),
        lr=lr,
        data=toy_data(dtype=torch.float64),
        module=tiny(dtype=torch.float64),
        **EXACT,
    )
    torch.testing.assert_close(found, reference(PLAIN[name]), rtol=1e-7, atol=1e-9)


def test_momentum_and_weight_decay_are_torchs_own():
    extra = {"momentum": 0.9, "weight_decay": 0.01}
    wanted = reference(lambda p: torch.optim.SGD(p, lr=0.1, **extra))
    for method, torch_options in (
        (("dp-sgd", {"clip": 1e6, **extra}), {}),
        (("dp-sgd", {"clip": 1e6}), extra),
    ):
        found, _ = run(
            method,
            lr=0.1,
            data=toy_data(dtype=torch.float64),
            module=tiny(dtype=torch.float64),
            torch_options=torch_options,
            **EXACT,
        )
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def sharp(steps, rho, lr, last):
    """SAM as in its paper, and the form that reuses the last gradient."""
    module, data = tiny(dtype=torch.float64), toy_data(dtype=torch.float64)
    params = list(module.parameters())

    def gradient():
        return torch.autograd.grad(mean_loss(module, data), params)

    previous = None
    for _ in range(steps):
        ascent = previous if last else gradient()
        kept = [p.detach().clone() for p in params]
        if ascent is not None:
            length = torch.cat([g.flatten() for g in ascent]).norm()
            with torch.no_grad():
                for p, g in zip(params, ascent, strict=True):
                    p += rho * g / length
        descent = gradient()
        with torch.no_grad():
            for p, g, theta in zip(params, descent, kept, strict=True):
                p.copy_(theta - lr * g)
        previous = descent
    return flat(module)


@pytest.mark.parametrize("name", ["dp-sam", "dp-sat"])
def test_without_noise_and_clipping_it_is_sharpness_aware_minimisation(name):
    options = {"clip": 1e6, "rho": 0.1}
    found, _ = run(
        (name, options),
        data=toy_data(dtype=torch.float64),
        module=tiny(dtype=torch.float64),
        **EXACT,
    )
    torch.testing.assert_close(found, sharp(6, 0.1, 0.3, name == "dp-sat"), rtol=1e-7, atol=1e-9)
    # The comparison sees a perturbation of another length.
    assert (found - sharp(6, 0.11, 0.3, name == "dp-sat")).abs().max() > 1e-6


@pytest.mark.parametrize("decouple_lr", [False, True])
def test_what_is_remembered_is_not_in_the_users_hands(decouple_lr):
    """A loop may do what it likes with .grad after a step: the next perturbation is along what was
    released."""
    ends = []
    for wiped in (False, True):
        options = {"method": get("dp-sat", rho=0.5), "clipping": None, "decouple_lr": decouple_lr}
        _, module, optimizer, loader = private(tiny(), toy_data(), **options)
        for _ in range(3):
            train(module, optimizer, loader, steps=1)
            for parameter in module.parameters() if wiped else ():
                parameter.grad.fill_(7.0)
        ends.append(flat(module))
    assert torch.equal(*ends)
    assert not torch.equal(
        ends[0], run(("dp-sgd", {}), sigma=1.0, steps=3, lr=1.0, decouple_lr=decouple_lr)[0]
    )


class Pushing(Controller):
    """A controller of one's own that reads the released gradient: C is its norm."""

    probe = None

    def init(self):
        return ClipState(1.0)

    def update(self, released, state):
        return ClipState(float(released.gradient.norm()))

    def entry(self, state):
        return None


@pytest.mark.parametrize("name", ["adaclip", "adadpigu", "dp-sat", "dp-sgd"])
def test_an_optimizer_that_writes_into_the_gradient_changes_nothing_that_was_released(name):
    """torch's Nesterov momentum does, in its foreach form: rules and controllers must not read what
    it left."""
    ends = []
    for each in (True, False):
        module = tiny()
        optimizer = torch.optim.SGD(
            module.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=each
        )
        options = {
            "clipping": Pushing() if name == "dp-sgd" else None,
            "epochs": 8,
            "target_delta": 1e-5,
        }
        made = private(module, toy_data(), method=get(name), optimizer=optimizer, **options)
        for _ in range(3):
            train(*made[1:], steps=2)
        ends.append(flat(module))
    assert torch.equal(*ends)


# -- combinations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dp-adam", "dp-sat", "dp-sam", "dp-is"])
def test_spectral_control_combines_with_other_updates(name):
    """C moves, and a replay of its course gives the same weights: the controller is all that it
    adds."""
    module = tiny()
    method = get(name, **({"ascent_batch": "same"} if name == "dp-sam" else {}))
    optimizer = method.optimizer(module.parameters(), lr=0.01)
    spectral = Spectral(probe="0", period=2, gain=0.3)
    _, module, optimizer, loader = private(
        module,
        toy_data(),
        method=method,
        optimizer=optimizer,
        clipping=spectral,
        epochs=8,
        target_delta=1e-5,
    )
    for _ in range(3):
        train(module, optimizer, loader, steps=2)
    clips = [entry[4] for entry in optimizer.clip_history]
    assert len(set(clips)) == 3
    again, _ = run(method, sigma=1.0, lr=0.01, clipping=Replay(optimizer.clip_history, initial=1.0))
    assert torch.equal(flat(module), again)


@pytest.mark.parametrize(
    "name", ["dp-sgd", "auto-s", "dp-psac", "quantile", "slaclip", "dp-is", "adaclip"]
)
def test_a_decoupled_step_is_the_gradient_over_the_sensitivity(name):
    """At a fixed C it is DP-SGD with the rate divided by C."""
    options = {"clip": 0.25}
    options |= {"gain": 0.0} if name in ("quantile", "slaclip") else {}
    coupled = run((name, options), lr=0.4)[0]
    decoupled = run((name, options), lr=0.1, decouple_lr=True)[0]
    torch.testing.assert_close(coupled, decoupled, rtol=1e-5, atol=1e-6)


def test_automatic_clipping_does_not_depend_on_its_length():
    """With Adam to the last bit where the length is a power of two; with SGD where the step is
    decoupled."""
    for scale in (0.5, 8.0):
        found = [
            run(
                get("auto-s", clip=clip),
                lr=0.01,
                sigma=0.8,
                module=tiny(),
            )[1]
            for clip in (1.0, scale)
        ]
        assert torch.equal(found[0][0] * scale, found[1][0])


def test_a_peek_at_the_clip_rate_claims_nothing():
    from zetaclip import NoGuarantee

    for name, options in (("dp-adam-ac", {}), ("dp-is", {"cap": 2.0})):
        method = methods.get(name, unsound=True, **options)
        module = tiny()
        engine, module, optimizer, loader = private(
            module,
            toy_data(),
            q=0.25,
            method=method,
            clipping=None,
            optimizer=method.optimizer(module.parameters()),
        )
        train(module, optimizer, loader, steps=2)
        with pytest.raises(NoGuarantee, match=name):
            engine.get_epsilon(1e-5)
        assert not engine.ledger.header.claims_privacy
