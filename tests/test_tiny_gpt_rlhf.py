"""tiny_gpt_rlhf.py: formulas in loops, the GPT, the grammar, five updates, runs, bad input."""

import argparse
import copy
import json
import math
import random
import shutil
import signal
import statistics
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy import stats

import tiny_gpt_rlhf as tg
from conftest import (
    bad_files,
    check_full_disk,
    check_refused,
    check_unwritable,
    close,
    events_of,
    golden,
    metrics,
    same,
    seconds,
)

CPU = torch.device("cpu")
RL = ["ppo", "grpo"]
POLICIES = ["sft", "ppo", "grpo", "dpo"]
SIZES = """--width 16 --layers 1 --heads 2 --reviews 200 --eval_texts 8 --dpo_texts 32 --threads 1
--num_prompts 3 --group_size 4 --minibatch_size 5 --sft_batch 8 --rm_batch 8 --dpo_batch 6
--dpo_candidates 4 --evaluations 2"""
TINY = SIZES.split()
STEPS = {"sft": 6, "rm": 5, "ppo": 4, "grpo": 4, "dpo": 5}
SHORT = [word for stage, n in STEPS.items() for word in (f"--{stage}_steps", str(n))]


def make_args(*flags: str) -> argparse.Namespace:
    return tg.parse_args([*TINY, *flags, "--quiet"])


def random_gpt(args, size: int, scalar=False, seed=0) -> tg.GPT:
    """Weights large enough for unequal probabilities; <eos> often enough for ragged texts."""
    torch.manual_seed(seed)
    model = tg.GPT(args, size, scalar)
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    direction = model.token.weight.data[tg.EOS]
    model.norm.bias.data += 2 * direction / direction.norm()
    return model


def make_trainer(stage: str, *flags: str) -> tg.Trainer:
    """A trainer with random networks before it, in double precision, its actor off pi_ref."""
    args = make_args(*flags)
    data = tg.load_data(args)
    given = tg.load_given(args, data)
    size = 4 + len(given["characters"])
    if stage != "sft":
        given["sft"] = random_gpt(args, size, seed=1).state_dict()
    if stage not in ("sft", "rm"):
        given["rm"] = random_gpt(args, size, True, seed=2).state_dict()
    with pytest.MonkeyPatch.context() as patch:
        if stage in RL:  # 512 texts: slow
            patch.setattr(tg.Trainer, "look_at_sft", lambda t: None)
        trainer = tg.Trainer(args, stage, given, data)
    if stage in RL:
        trainer.shift, trainer.spread = 0.3, 1.7
    torch.manual_seed(3)
    for model in (trainer.actor, trainer.reference, trainer.reward_model, trainer.critic):
        if model is not None:
            model.double()
    for p in trainer.trained().parameters():
        p.data += 0.1 * torch.randn_like(p)
    return trainer


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def slope(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def sgd(trainer: tg.Trainer, rate=0.1) -> list[float]:
    """Plain gradient steps of this rate, half way. Returns a list of the rates of all steps."""
    groups = [{"params": group["params"]} for group in trainer.optimizer.param_groups]
    trainer.optimizer, rates = torch.optim.SGD(groups, lr=rate), []
    trainer.rate, trainer.step, trainer.steps = 2 * rate, 10, 20
    trainer.optimizer.register_step_post_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    return rates


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- 1  the maths --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("dpo")["cases"], ids=lambda c: str(c["beta"]))
def test_dpo_golden(case):
    """TRL's loss, its gradient, implicit rewards, margins and accuracy."""
    data = {name: double(values) for name, values in golden("dpo")["inputs"].items()}
    chosen = data["policy_chosen_logps"].requires_grad_()
    rejected = data["policy_rejected_logps"].requires_grad_()
    reference = data["ref_chosen_logps"] - data["ref_rejected_logps"]
    loss = tg.dpo_loss(chosen - rejected, reference, case["beta"])
    close(loss, double(case["per_sequence_loss"]), 1e-10)
    loss.mean().backward()
    assert loss.mean().item() == pytest.approx(case["loss"], abs=1e-10)
    close(chosen.grad, double(case["dloss_dchosen_logps"]), 1e-10)
    close(rejected.grad, double(case["dloss_drejected_logps"]), 1e-10)


@pytest.mark.parametrize("case", golden("dpo")["cases"], ids=lambda c: str(c["beta"]))
def test_dpo_metrics_golden(case, monkeypatch):
    """The update's own metrics, where the log-probabilities of all texts are the golden ones."""
    data = golden("dpo")["inputs"]
    flags = ["--dpo_beta", str(case["beta"]), "--dpo_alpha", "0", "--dpo_batch", "6"]
    trainer, seen = make_trainer("dpo", *flags), []

    def score_tokens(model, ids, temperature):
        name = "policy" if model is trainer.actor else "ref"
        both = zip(data[f"{name}_chosen_logps"], data[f"{name}_rejected_logps"], strict=True)
        total = double([x for pair in both for x in pair])
        mask = tg.chosen_mask(ids, trainer.vocabulary.index["："])
        seen.append(name)
        anchor = 0 * sum(p.sum() for p in model.parameters())
        return mask * (total / mask.sum(dim=1))[:, None] + anchor, None

    monkeypatch.setattr(tg, "score_tokens", score_tokens)
    row = tg.update_dpo(trainer)
    assert sorted(seen) == ["policy", "ref"]
    assert row["losses/policy_loss"] == pytest.approx(case["loss"], abs=1e-10)
    assert row["dpo/accuracy"] == pytest.approx(case["rewards/accuracies"])
    for name, key in (("margin", "margins"), ("reward_chosen", "chosen")):
        assert row[f"dpo/{name}"] == pytest.approx(statistics.mean(case[f"rewards/{key}"]))
    assert row["dpo/reward_rejected"] == pytest.approx(statistics.mean(case["rewards/rejected"]))


def test_bradley_terry_golden():
    data = golden("reward_model")
    case = data["cases"][0]
    assert case["margin"] is None and case["center_rewards_coefficient"] is None
    chosen = double(data["inputs"]["rewards_chosen"]).requires_grad_()
    rejected = double(data["inputs"]["rewards_rejected"]).requires_grad_()
    loss = tg.bradley_terry_loss(chosen, rejected)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-10)
    close(torch.cat([chosen.grad, rejected.grad]), double(case["grad"]), 1e-10)


@pytest.mark.parametrize("case", golden("grpo")["advantages"])
def test_grpo_advantages_golden(case):
    size = case["num_generations"]
    rewards = torch.tensor(case["rewards_per_func"])[:, 0].view(-1, size)
    ours = tg.compute_grpo(rewards, case["scale_rewards"]).flatten()
    close(ours, torch.tensor(case["advantages"]), 2e-6)
    if case["scale_rewards"] == "group":
        flat = tg.flat_groups(rewards).repeat_interleave(size)
        assert flat.tolist() == case["is_std_zero"]


def token_losses() -> list[dict]:
    cases = golden("grpo")["losses"]
    return [c for c in cases if c["settings"].get("level", "token") == "token"]


@pytest.mark.parametrize("case", token_losses(), ids=lambda c: f"{c['loss_type']}-{c['beta']}")
def test_grpo_losses_golden(case):
    data, settings = golden("grpo")["loss_inputs"], case["settings"]
    mask = double(data["mask"]).bool()
    advantages = double(data["advantages_by_scale_rewards"][case["scale_rewards"]])
    logp = double(data["per_token_logps"]).requires_grad_()
    ratio = (logp - double(data["old_per_token_logps"])).exp()
    low = settings.get("eps", data["epsilon"])
    high = settings.get("eps_high", low)
    objective = tg.clipped_surrogate(ratio, advantages[:, None].expand_as(mask), low, high)
    objective = objective - case["beta"] * tg.kl_k3(logp, double(data["ref_per_token_logps"]))
    length = data["max_completion_length"]
    loss = -tg.aggregate(objective, mask, case["loss_type"], length)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    close(logp.grad, double(case["grad"]), 1e-6)


@pytest.mark.parametrize("case", golden("ppo_clip")["cases"])
def test_clip_golden(case):
    logp = double([case["new_logprob"]]).requires_grad_()
    advantage = torch.full_like(logp, case["advantage"]).detach()
    ratio = (logp - case["old_logprob"]).exp()
    loss = -tg.clipped_surrogate(ratio, advantage, case["clip_coef"], case["clip_coef"]).sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-10)
    assert logp.grad.item() == pytest.approx(case["dloss_dnewlogprob"], abs=1e-10)


def test_kl_golden():
    raw = golden("kl_estimators")["raw"]
    log_ratio = double(raw["log_ratio"])
    for name, kl in (("k2", tg.kl_k2), ("k3", tg.kl_k3)):
        close(kl(torch.zeros_like(log_ratio), log_ratio), double(raw[name]))
    for case in golden("kl_estimators")["distributions"]:
        q, p = double(case["logq"]), double(case["logp"])
        mean = (q.exp() * tg.kl_k3(q, p)).sum().item()  # sampled from q, so KL(q || p)
        assert mean == pytest.approx(case["exact_KL_q_p"], abs=1e-12)


def test_k2_in_a_loss_pulls_to_the_reference_as_the_kl_does():
    """E_pi[grad k2] = grad KL(pi || ref), over all actions; E_pi[grad k3] is grad KL(ref || pi)."""
    logits = double([[0.3, -1.2, 2.0, 0.1]]).requires_grad_()
    ref = double([[-0.5, 0.4, 0.2, 1.0]]).log_softmax(dim=1)
    logp = logits.log_softmax(dim=1)
    kl = (logp.exp() * (logp - ref)).sum()
    reverse = (ref.exp() * (ref - logp)).sum()
    for penalty, exact in ((tg.kl_k2, kl), (tg.kl_k3, reverse)):
        loss = (logp.exp().detach() * penalty(logp, ref)).sum()
        ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, exact))
        close(ours, theirs)
    close(tg.kl_k2(double([0.5, -2.0]), double([1.5, -2.0])), double([0.5, 0.0]))


def ragged(rows=7, length=9, seed=0) -> torch.Tensor:
    """Masks of texts: a prompt, then chosen characters, then nothing."""
    rng = random.Random(seed)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    for n in range(rows):
        first = rng.randrange(0, 4)
        mask[n, first : rng.randrange(first + 1, length + 1)] = True
    mask[0], mask[1] = torch.arange(length) == 0, torch.arange(length) >= 3
    return mask


def test_last_index():
    mask = ragged()
    assert tg.last_index(mask).tolist() == [max(t for t in range(9) if row[t]) for row in mask]
    assert tg.last_index(mask)[:2].tolist() == [0, 8]


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_token_rewards_in_loops(beta):
    mask = ragged()
    logp, logp_ref = torch.randn(2, 7, 9, dtype=torch.float64)
    scores = torch.randn(7, dtype=torch.float64)
    ours = tg.token_rewards(logp, logp_ref, scores, mask, beta)
    for n in range(7):
        chosen = [t for t in range(9) if mask[n, t]]
        for t in range(9):
            expected = -beta * (logp[n, t] - logp_ref[n, t]).item() if t in chosen else 0.0
            expected += scores[n].item() if t == chosen[-1] else 0.0
            assert ours[n, t].item() == pytest.approx(expected, abs=1e-12)
        text = scores[n] - beta * sum(logp[n, t] - logp_ref[n, t] for t in chosen)
        assert ours[n].sum().item() == pytest.approx(text.item(), abs=1e-12)


def loop_gae(rewards: list, values: list, gamma: float, lam: float) -> list[float]:
    """By the definition, a sum over delta, of one text's chosen characters."""
    length = len(rewards)
    delta = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < length else 0.0) - values[t]
        for t in range(length)
    ]
    return [
        sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)
    ]


def text_batch(trainer: tg.Trainer, number=12) -> tg.Batch:
    args = trainer.args
    prompts = trainer.prompts(number)
    generator = torch.Generator().manual_seed(5)
    return tg.sample_batch(trainer.actor, prompts, args.context, args.temperature, generator)


@pytest.mark.parametrize("gamma,lam", [("1", "0.95"), ("0.9", "0.5"), ("1", "1"), ("0.8", "0")])
def test_ppo_inputs_in_loops(gamma, lam):
    flags = ["--gamma", gamma, "--lam", lam, "--beta", "0.3", "--temperature", "0.7"]
    trainer = make_trainer("ppo", *flags)
    batch = text_batch(trainer)
    lengths = batch.mask.sum(dim=1).tolist()
    assert len(set(lengths)) > 3 and batch.stopped.any()
    scores, advantages, returns = tg.prepare_inputs(trainer, batch)
    for n, row in enumerate(batch.ids.tolist()):
        row = [i for i in row if i != tg.PAD]
        score = trainer.reward_model(torch.tensor([row]))[0, -1].item()
        score = (score - trainer.shift) / trainer.spread
        assert scores[n].item() == pytest.approx(score)
        values = trainer.critic(torch.tensor([row[:-1]]))[0].tolist()
        chosen = [t for t in range(len(row) - 1) if batch.mask[n, t]]
        rewards = []
        for t in chosen:
            pair = [loop_logp(m, row, t, 0.7) for m in (trainer.actor, trainer.reference)]
            rewards.append(-0.3 * (pair[0] - pair[1]).item() + score * (t == chosen[-1]))
        expected = loop_gae(rewards, [values[t] for t in chosen], float(gamma), float(lam))
        assert advantages[n][batch.mask[n]].tolist() == pytest.approx(expected, abs=1e-9)
        expected = [a + values[t] for a, t in zip(expected, chosen, strict=True)]
        assert returns[n][batch.mask[n]].tolist() == pytest.approx(expected, abs=1e-9)


def loop_logp(model, row: list[int], t: int, temperature: float) -> torch.Tensor:
    """log pi of row[t + 1] after row[: t + 1], over all but <pad> and <bos>."""
    logits = model(torch.tensor([row[: t + 1]]))[0, -1] / temperature
    return logits[row[t + 1]] - logits[2:].exp().sum().log()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_policy_dist(temperature):
    logits = 3 * torch.randn(5, 9, dtype=torch.float64)
    log_probs = tg.policy_dist(logits, temperature)
    assert (log_probs[:, [tg.PAD, tg.BOS]] == -math.inf).all()
    for n in range(5):
        parts = [math.exp(x / temperature) for x in logits[n, 2:].tolist()]
        expected = [x / sum(parts) for x in parts]
        assert log_probs[n, 2:].exp().tolist() == pytest.approx(expected)


def test_score_tokens_in_loops():
    trainer = make_trainer("ppo")
    batch = text_batch(trainer, 6)
    logp, entropy = tg.score_tokens(trainer.actor, batch.ids, 0.6)
    assert logp.isfinite().all() and entropy.isfinite().all()
    for n, row in enumerate(batch.ids.tolist()):
        for t in range(len(row) - 1):
            if row[t + 1] == tg.PAD:
                assert logp[n, t] == 0
            else:
                expected = loop_logp(trainer.actor, row, t, 0.6).item()
                assert logp[n, t].item() == pytest.approx(expected)
    probs = tg.policy_dist(trainer.actor(batch.ids[:, :-1]), 0.6).exp().detach().numpy()
    expected = stats.entropy(probs, axis=2).flatten().tolist()
    assert entropy.flatten().tolist() == pytest.approx(expected)


def test_whiten():
    mask, x = ragged(), torch.randn(7, 9, dtype=torch.float64)
    kept = x[mask].tolist()
    ours = tg.whiten(x, mask)
    assert not ours[~mask].any()
    expected = [(v - statistics.mean(kept)) / (statistics.stdev(kept) + 1e-8) for v in kept]
    assert ours[mask].tolist() == pytest.approx(expected)
    assert not tg.whiten(torch.full((7, 9), 0.7), mask).any()


# ---- 2  masks ------------------------------------------------------------------------------------


def one_step(monkeypatch, stage: str, *flags: str, junk=False) -> tuple:
    """Metrics and gradients of one update; junk: more padding, that embeds to large numbers."""
    trainer = make_trainer(stage, "--max_grad_norm", "1e9", "--update_epochs", "1", *flags)
    args, real, pack = trainer.args, tg.sample_batch, tg.pack
    args.minibatch_size = 1000

    def sample_batch(*inputs):
        batch = real(*inputs)
        tail = torch.full((len(batch.ids), 5), tg.PAD)
        ids = torch.cat([batch.ids, tail], dim=1)[:, : args.context]
        mask = torch.cat([batch.mask, tail > 9], dim=1)[:, : args.context - 1]
        logp = torch.cat([batch.logp_old, 0.0 * tail], dim=1)[:, : args.context - 1]
        return tg.Batch(ids, mask, batch.stopped, torch.where(mask, logp, -1e4))  # exp: inf

    with monkeypatch.context() as patch:
        if junk:
            for name in ("actor", "reference", "reward_model", "critic"):
                if (model := getattr(trainer, name)) is not None:
                    model.token.weight.data[tg.PAD] = 30 * torch.randn(16)
            patch.setattr(tg, "sample_batch", sample_batch)
            patch.setattr(tg, "pack", lambda rows, d: pack([*rows, [tg.PAD] * 40], d)[:-1])
        row = tg.UPDATES[stage](trainer)
    parts = [part for name, part in trainer.parts.items() if name != "optimizer"]
    return row, [slope(part) for part in parts], parts


UPDATES = [
    ("sft",),
    ("rm", "--rm_loss", "bce"),
    ("rm", "--rm_loss", "bradley_terry"),
    ("ppo",),
    ("grpo", "--loss_type", "bnpo"),
    ("grpo", "--loss_type", "grpo"),
    ("grpo", "--loss_type", "dr_grpo"),
    ("dpo", "--dpo_pairs", "policy"),
    ("dpo", "--dpo_pairs", "data"),
]


@pytest.mark.parametrize("stage", UPDATES, ids=" ".join)
def test_what_comes_after_eos_changes_nothing(stage, monkeypatch):
    clean, clean_slopes, _ = one_step(monkeypatch, *stage)
    dirty, dirty_slopes, parts = one_step(monkeypatch, *stage, junk=True)
    assert clean == pytest.approx(dirty, abs=1e-10)
    for one, two, part in zip(clean_slopes, dirty_slopes, parts, strict=True):
        assert one.abs().max() > 1e-4
        close(one, two, 1e-9)
        assert not part.token.weight.grad[tg.PAD].any()
        assert part.token.weight.grad[tg.BOS].any()


@pytest.mark.parametrize("stage", UPDATES, ids=" ".join)
def test_where_the_gradient_is(stage, monkeypatch):
    """At what the policy chose and nowhere else: not in the prompt, at <eos>, not after it."""
    outputs, masks, packed, real, pack = [], [], [], tg.sample_batch, tg.pack
    forward = tg.GPT.forward

    def spy(model, ids, cache=None):
        out = forward(model, ids, cache)
        if out.requires_grad:
            out.retain_grad()
            outputs.append(out)
        return out

    def sample_batch(*inputs):
        masks.append(real(*inputs))
        return masks[-1]

    monkeypatch.setattr(tg.GPT, "forward", spy)
    monkeypatch.setattr(tg, "sample_batch", sample_batch)
    monkeypatch.setattr(tg, "pack", lambda *a: packed.append(pack(*a)) or packed[-1])
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    flags = ["--grpo_beta", "1"]  # a flat group has a gradient, too
    one_step(monkeypatch, *stage, *flags)
    found = outputs[0].grad
    ids = masks[-1].ids if stage[0] in RL else packed[-1]
    ends = (ids[:, 1:] == tg.EOS).sum(dim=1)
    assert ends.any()
    if stage[0] == "rm":
        last = [max(t for t, i in enumerate(row) if i != tg.PAD) for row in ids.tolist()]
        assert (ids.gather(1, torch.tensor(last)[:, None]) == tg.EOS).all()
        assert found.nonzero().tolist() == [[n, t] for n, t in enumerate(last)]
        return
    assert not found[:, :, [tg.PAD, tg.BOS]].any()
    rows = []
    for row in ids.tolist():  # <bos> category category ： review
        first = 0 if stage[0] == "sft" else 3
        last = max(t for t, i in enumerate(row) if i != tg.PAD)
        rows.append([first <= t < last for t in range(len(row) - 1)])
    assert found.abs().sum(dim=2).bool().tolist() == rows
    if stage[0] in RL:
        assert masks[-1].mask.tolist() == rows
    if stage[0] == "ppo":
        assert outputs[1].grad.bool().tolist() == rows
    n = int(ends.nonzero()[0])
    t = ids[n].tolist().index(tg.EOS) - 1
    assert found[n, t, tg.EOS] != 0  # stopping is trained


def test_chosen_mask():
    vocabulary = tg.Vocabulary("a b：")
    rows = [vocabulary.encode(tg.Review("a", True, text)) for text in ("b", "b：b b", "")]
    mask = tg.chosen_mask(tg.pack(rows, CPU), vocabulary.index["："])
    assert mask.int().tolist() == [[0, 0, 1, 1, *[0] * 4], [0, 0, *[1] * 6], [0, 0, 1, *[0] * 5]]


# ---- 3  the GPT ----------------------------------------------------------------------------------


def a_gpt(scalar=False) -> tg.GPT:
    args = argparse.Namespace(width=16, layers=2, heads=4, context=10)
    return random_gpt(args, 12, scalar).double()


@pytest.mark.parametrize("scalar", [False, True])
def test_a_cache_changes_nothing(scalar):
    model, ids = a_gpt(scalar), torch.randint(12, (5, 10))
    whole = model(ids)
    assert whole.shape == ((5, 10) if scalar else (5, 10, 12))
    cache: list = []
    parts = [model(ids[:, t : t + 1], cache) for t in range(10)]
    close(torch.cat(parts, dim=1), whole, 1e-10)
    assert len(cache) == 2 and cache[0][0].shape == (5, 4, 10, 4)


def test_no_character_sees_a_later_one():
    model, ids = a_gpt(), torch.randint(12, (1, 10))
    before = model(ids)
    for t in range(10):
        other = ids.clone()
        other[0, t] = (other[0, t] + 1) % 12
        changed = (model(other) - before).abs().amax(dim=2)[0] > 1e-9
        assert changed.tolist() == [k >= t for k in range(10)]


def test_gpt_in_loops():
    """One block, all its sums written out for one text; logits by the token embeddings."""
    args = argparse.Namespace(width=8, layers=1, heads=2, context=6)
    model, ids = random_gpt(args, 7).double(), torch.randint(7, (1, 6))
    block, x = model.blocks[0], model.token.weight[ids[0]] + model.position.weight
    q, k, v = block.qkv(block.norm_1(x)).split(8, dim=1)
    rows = []
    for t in range(6):
        heads = []
        for part in (slice(0, 4), slice(4, 8)):
            scores = torch.stack([q[t, part] @ k[s, part] / 2 for s in range(t + 1)])
            heads.append(scores.softmax(dim=0) @ v[: t + 1, part])
        rows.append(torch.cat(heads))
    x = x + block.out(torch.stack(rows))
    x = x + block.down(torch.nn.functional.gelu(block.up(block.norm_2(x))))
    close(model(ids)[0], model.norm(x) @ model.token.weight.T, 1e-10)
    scalar = tg.GPT(args, 7, scalar=True).double()
    scalar.load_state_dict(model.state_dict(), strict=False)
    expected = model.norm(x) @ scalar.head.weight[0] + scalar.head.bias
    close(scalar(ids)[0], expected, 1e-10)
    sizes = {name: tuple(p.shape) for name, p in tg.GPT(args, 7).named_parameters()}
    assert "head.weight" not in sizes and sizes["token.weight"] == (7, 8)


PROMPTS = [[1, 5], [1, 5, 6, 7], [1], [1, 9, 9], [1, 5, 6, 7, 8]] * 6


def draws(temperature=1.0, context=10, seed=0, prompts=PROMPTS, model=None) -> tg.Batch:
    generator = torch.Generator().manual_seed(seed)
    return tg.sample_batch(model or a_gpt(), prompts, context, temperature, generator)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_texts_prompts_masks_and_probabilities(temperature):
    batch, model = draws(temperature), a_gpt()
    logp, _ = tg.score_tokens(model, batch.ids, temperature)
    assert batch.ids.shape[1] == 10 and batch.mask.shape == batch.logp_old.shape == (30, 9)
    assert 0 < batch.stopped.sum() < 30
    for n, (row, prompt) in enumerate(zip(batch.ids.tolist(), PROMPTS, strict=True)):
        assert row[: len(prompt)] == prompt
        end = row.index(tg.EOS) if tg.EOS in row else 9
        assert bool(batch.stopped[n]) == (tg.EOS in row)
        assert not any(row[end + 1 :]) and not {tg.PAD, tg.BOS} & {*row[1 : end + 1]}
        assert batch.mask[n].tolist() == [len(prompt) <= t + 1 <= end for t in range(9)]
    close(batch.logp_old, logp.masked_fill(~batch.mask, 0.0), 1e-9)
    assert batch.logp_old.isfinite().all() and (batch.logp_old[batch.mask] < 0).all()


def test_texts_follow_the_seed():
    one, again, other = draws(seed=1), draws(seed=1), draws(seed=2)
    assert torch.equal(one.ids, again.ids) and torch.equal(one.logp_old, again.logp_old)
    assert one.ids.shape != other.ids.shape or not torch.equal(one.ids, other.ids)


def test_the_end_of_the_context():
    model = a_gpt()
    model.norm.bias.data -= 60 * model.token.weight.data[tg.EOS]  # never stops
    batch = draws(model=model)
    assert batch.ids.shape == (30, 10) and not batch.stopped.any() and (batch.ids > 2).sum() > 200
    assert batch.mask[:, -1].all() and model(batch.ids).isfinite().all()
    model.norm.bias.data += 120 * model.token.weight.data[tg.EOS]  # stops at once
    batch = draws(model=model, prompts=[[1, 5]] * 3)
    assert batch.ids.tolist() == [[1, 5, tg.EOS]] * 3 and batch.stopped.all()
    assert batch.mask.tolist() == [[False, True]] * 3


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_characters_are_the_policys(temperature):
    """The second and third character after a prompt, that another text's prompt is longer than."""
    number, model = 20000, a_gpt()
    prompts = [[1, 5]] * number + [[1, 5, 6, 7, 8]]
    batch = draws(temperature, context=6, prompts=prompts, model=model)
    first = batch.ids[:number, 2]
    probs = tg.policy_dist(model(torch.tensor([[1, 5]]))[0, -1], temperature).exp().detach()
    count = torch.bincount(first, minlength=12)
    assert not count[[tg.PAD, tg.BOS]].any()
    expected = probs[2:] * number
    assert stats.chisquare(count[2:].numpy(), expected.numpy()).pvalue > 1e-4
    common = int(count.index_fill(0, torch.tensor([tg.EOS]), 0).argmax())
    second = batch.ids[:number, 3][first == common]
    probs = tg.policy_dist(model(torch.tensor([[1, 5, common]]))[0, -1], temperature).exp()
    count = torch.bincount(second, minlength=12)[2:].numpy()
    expected = (probs[2:] / probs[2:].sum() * len(second)).detach().numpy()
    assert stats.chisquare(count, expected).pvalue > 1e-4


def test_scores_are_read_at_eos_or_the_last_character():
    model = a_gpt(True)
    rows = [[1, 5, 6, 2], [1, 5, 2], [1, 5, 6, 7, 8, 9]]
    scores = tg.read_scores(model, tg.pack(rows, CPU))
    expected = [model(torch.tensor([row]))[0, -1].item() for row in rows]
    assert scores.tolist() == pytest.approx(expected)


# ---- 4  data -------------------------------------------------------------------------------------

JUDGED = [
    ("房间很干净。", 1),
    ("房间脏。", -1),
    ("房间不干净。", -1),
    ("房间不脏。", 1),
    ("房间一点也不干净。", -1),
    ("早餐没那么难吃。", 1),
    ("没有失望。", 1),
    ("没有惊喜。", -1),
    ("推荐购买。", 1),
    ("不推荐。", -1),
    ("虽然房间很脏，但是服务热情。", 1),
    ("房间很干净，不过服务有点差。", -1),
    ("房间干净，服务热情，但是早餐难吃。", -1),  # only what follows counts
    ("房间脏，服务差，但是早餐可口，位置偏僻。", -1),  # a tie: the last clause
    ("房间脏，但是早餐难吃，位置方便，推荐购买。", 1),
    ("房间脏，但是早餐难吃，位置方便。", 1),
    ("但是房间脏，不过服务热情。", 1),
    ("房间很干净，服务差。", -1),
    ("服务差，房间很干净。", 1),
    ("服务差，房间很干净，很满意。", 1),
    ("很满意，服务热情，房间脏。", 1),
    ("房间很干净，早餐非常丰富，位置方便，会再来。", 1),
    ("房间很干净，服务热情，早餐丰富，位置方便，会再来。", 0),  # five
    ("房间很干净，房间很干净。", 0),
    ("房间很干净，房间干净。", 1),
    ("房间很干净", 0),
    ("房间很干净。。", 0),
    ("房间很干净，。", 0),
    ("，房间很干净。", 0),
    ("房间很干净,服务热情。", 0),
    ("房间很好吃。", 0),
    ("房间很不干净。", 0),
    ("虽然但是房间很干净。", 0),
    ("房间很干净，但是房间很干净。", 0),
    ("虽然很满意，很满意。", 0),
    ("但是。", 0),
    ("虽然。", 0),
    ("。", 0),
    ("", 0),
    ("房间很干净。 ", 0),
    ("电池很掉电快。", -1),
    ("屏幕一点也不偏暗。", 1),
]


@pytest.mark.parametrize("text,truth", JUDGED)
def test_judge(text, truth):
    assert tg.judge(text) == truth


def test_every_clause():
    assert all(tg.judge(f"{clause}。") == sign for clause, sign in tg.CLAUSES.items())
    for aspects in tg.ASPECTS.values():
        for aspect, (good, bad) in aspects.items():
            for words, sign in ((good, 1), (bad, -1)):
                for word in words.split():
                    assert all(tg.CLAUSES[aspect + d + word] == sign for d in tg.DEGREES)
                    assert all(tg.CLAUSES[aspect + n + word] == -sign for n in tg.NEGATIONS)
    # nothing is written two ways with two signs
    written = [
        (aspect + extra + word, sign if extra in tg.DEGREES else -sign)
        for aspects in tg.ASPECTS.values()
        for aspect, words in aspects.items()
        for part, sign in zip(words, (1, -1), strict=True)
        for word in part.split()
        for extra in (*tg.DEGREES, *tg.NEGATIONS)
    ]
    assert dict(written) == dict(reversed(written))
    assert len(tg.CLAUSES) == len({clause for clause, _ in written}) + 10


def test_reviews_of_the_grammar():
    rng = random.Random(1)
    reviews = [tg.write_review(rng) for _ in range(3000)]
    assert reviews[:50] == [tg.write_review(r) for r in [random.Random(1)] for _ in range(50)]
    assert reviews[:50] != [tg.write_review(r) for r in [random.Random(2)] for _ in range(50)]
    for review in reviews:
        assert tg.judge(review.text) == (1 if review.positive else -1)
        assert len(review.category + review.text) + 3 <= 48
    texts = [review.text for review in reviews]
    assert 0.45 < statistics.mean(review.positive for review in reviews) < 0.55
    for words, least in ((tg.NEGATIONS, 0.3), (("但是",), 0.2), (("不过",), 0.1), (("虽然",), 0.2)):
        assert least < statistics.mean(any(w in text for w in words) for text in texts) < 0.7
    for verdict in (*tg.VERDICTS[1], *tg.VERDICTS[-1]):
        assert any(text.endswith(f"{verdict}。") for text in texts)
    assert {review.category for review in reviews} == tg.ASPECTS.keys()
    assert len(set(texts)) > 2400
    # more than single words decide: of texts with a 干净, many are negative
    clean = [review.positive for review in reviews if "干净" in review.text]
    assert 0.2 < statistics.mean(clean) < 0.8


def write(path: Path, text: str, encoding="utf-8") -> str:
    path.write_bytes(text.encode(encoding))
    return str(path)


TABLE = 'cat,label,review\n酒店,1,很好\n书籍,0,"不好,\n真的"\n水果,1,"他说""好"""\n'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_csv(encoding, newline, tmp_path):
    path = write(tmp_path / "a.csv", TABLE.replace("\n", newline), encoding)
    reviews, skipped = tg.load_csv(path, 48)
    told = [(r.category, r.positive, r.text.replace("\r", "")) for r in reviews]
    expected = [("酒店", True, "很好"), ("书籍", False, "不好,\n真的"), ("水果", True, '他说"好"')]
    assert told == expected and not skipped


def test_csv_columns_in_any_order(tmp_path):
    rows = ["id, Review ,LABEL,cat", "7,很好,1,酒店", "8, 差 ,0,书籍"]
    reviews, _ = tg.load_csv(write(tmp_path / "a.csv", "\n".join(rows)), 48)
    assert reviews == [tg.Review("酒店", True, "很好"), tg.Review("书籍", False, "差")]


def test_csv_counts_what_it_skips(tmp_path):
    rows = ["cat,label,review", "甲,1,", "甲,0", ",1,好", "甲,2,好", "甲,,好", "甲,x,好", "甲,1,好"]
    rows += [f"甲,1,{'好' * n}" for n in (4, 5)] + ["", "甲,1,  "]
    path = write(tmp_path / "a.csv", "\n".join(rows))
    reviews, skipped = tg.load_csv(path, 8)
    assert [len(r.text) for r in reviews] == [1, 4]  # <bos> 甲 ： 好好好好 <eos>
    assert skipped == {"empty": 4, "unlabelled": 3, "too long": 1}
    vocabulary = tg.Vocabulary("甲好：")
    assert max(len(vocabulary.encode(review)) for review in reviews) == 8


@pytest.mark.parametrize("text", ["", "cat,label\n甲,1\n", "甲,1,好\n", "\n\n"])
def test_csv_without_columns(text, tmp_path):
    with pytest.raises(ValueError, match=r"no column .*review"):
        tg.load_csv(write(tmp_path / "a.csv", text), 48)


def test_a_large_csv(tmp_path):
    rng = random.Random(0)
    rows = ["cat,label,review"]
    for k in range(60_000):
        review = tg.write_review(rng) if k < 500 else None
        rows.append(f"{review.category},{k % 2},{review.text}" if review else rows[k % 500 + 1])
    path = write(tmp_path / "a.csv", "\n".join(rows))
    start = time.perf_counter()
    reviews, skipped = tg.load_csv(path, 48)
    assert time.perf_counter() - start < 5 and len(reviews) == 60_000 and not skipped
    del reviews
    small = write(tmp_path / "b.csv", "\n".join(rows[:6000]))
    tracemalloc.start()
    tg.load_csv(small, 48)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6  # of a tenth


def test_vocabulary():
    vocabulary = tg.Vocabulary("好店酒：")
    review = tg.Review("酒店", True, "好店")
    ids = vocabulary.encode(review)
    assert ids == [tg.BOS, 6, 5, 7, 4, 5, tg.EOS] and len(vocabulary) == 8
    assert vocabulary.prompt("酒店") == ids[:4]
    assert vocabulary.decode(ids) == "酒店：好店"
    assert vocabulary.decode([*ids, 4, 4, tg.PAD]) == "酒店：好店"
    assert vocabulary.decode([tg.BOS, 4, tg.UNK, tg.PAD, 5]) == "好�店"
    assert vocabulary.encode(tg.Review("酒", True, "x好"))[3:] == [tg.UNK, 4, tg.EOS]
    assert tg.pack([[1, 2], [1, 4, 2]], CPU).tolist() == [[1, 2, 0], [1, 4, 2]]


def test_held_out_reviews_and_characters():
    args = make_args("--seed", "3", "--reviews", "300")
    train, test = tg.load_data(args)
    assert (len(train), len(test)) == (270, 30)
    assert tg.load_data(args) == (train, test) != tg.load_data(make_args("--reviews", "300"))
    characters = tg.load_given(args, (train, test))["characters"]
    assert set(characters) == set("".join(r.category + r.text for r in train)) | {"："}
    assert len(set(characters)) == len(characters)


# ---- 5  updates ----------------------------------------------------------------------------------


def rl_transcription(trainer, batch, order_state) -> list[dict[str, float]]:
    """update_rl a character at a time, in plain steps of rate 0.1. Rows of metrics."""
    args, ppo = trainer.args, trainer.stage == "ppo"
    _, advantages, returns = tg.prepare_inputs(trainer, batch)
    texts = [[i for i in row if i != tg.PAD] for row in batch.ids.tolist()]
    places = [[t for t in range(batch.mask.shape[1]) if row[t]] for row in batch.mask]
    if ppo:
        kept = [advantages[n, t].item() for n, row in enumerate(places) for t in row]
        mean, std = statistics.mean(kept), statistics.stdev(kept) + 1e-8
        advantages = (advantages - mean) / std
    generator, rows = torch.Generator(), []
    generator.set_state(order_state)
    with torch.no_grad():
        ref = {
            (n, t): loop_logp(trainer.reference, texts[n], t, args.temperature).item()
            for n, row in enumerate(places)
            for t in row
        }
    groups = [trainer.actor] + ([trainer.critic] if ppo else [])
    for _ in range(args.update_epochs):
        order = torch.randperm(len(texts), generator=generator).tolist()
        for first in range(0, len(texts), args.minibatch_size):
            part = order[first : first + args.minibatch_size]
            total = sum(len(places[n]) for n in part)
            loss, value_loss, one = 0.0, 0.0, dict.fromkeys(("entropy", "kl", "clipped"), 0.0)
            for n in part:
                logits = trainer.actor(torch.tensor([texts[n]]))[0]
                for t in places[n]:
                    probs = (logits[t, 2:] / args.temperature).softmax(dim=0)
                    logp = probs[texts[n][t + 1] - 2].log()
                    ratio, a = (logp - batch.logp_old[n, t]).exp(), advantages[n, t]
                    low, high = double(1 - args.clip_epsilon), double(1 + args.clip_epsilon)
                    term = min(ratio * a, min(max(ratio, low), high) * a)
                    if not ppo:
                        away = ref[n, t] - logp
                        k2, k3 = away * away / 2, away.exp() - away - 1
                        term = term - args.grpo_beta * (k2 if args.grpo_kl == "k2" else k3)
                    weight = {
                        "bnpo": 1 / total,
                        "grpo": 1 / len(places[n]) / len(part),
                        "dr_grpo": 1 / len(part) / args.context,
                    }["bnpo" if ppo else args.loss_type]
                    loss = loss - weight * term
                    one["entropy"] -= (probs * probs.log()).sum().item() / total
                    one["kl"] += (ratio - 1 - ratio.log()).item() / total
                    one["clipped"] += float(not low <= ratio <= high) / total
                if ppo:
                    values = trainer.critic(torch.tensor([texts[n]]))[0]
                    for t in places[n]:
                        value_loss = value_loss + 0.5 * (values[t] - returns[n, t]) ** 2 / total
            norms = []
            for model, objective in zip(groups, (loss, value_loss), strict=False):
                grads = torch.autograd.grad(objective, [*model.parameters()], allow_unused=True)
                grads = [
                    torch.zeros_like(p) if g is None else g
                    for p, g in zip(model.parameters(), grads, strict=True)
                ]
                norms.append(math.sqrt(sum(g.square().sum().item() for g in grads)))
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.data -= 0.1 * g * min(1.0, args.max_grad_norm / norms[-1])
            rows.append(
                {
                    "losses/policy_loss": loss.item(),
                    "losses/grad_norm": norms[0],
                    "losses/entropy": one["entropy"],
                    "losses/approx_kl": one["kl"],
                    "losses/clipfrac": one["clipped"],
                }
                | ({"losses/value_loss": value_loss.item()} if ppo else {})
            )
    return rows


@pytest.mark.parametrize(
    "stage,flags",
    [
        ("ppo", []),
        ("ppo", ["--beta", "0", "--max_grad_norm", "0.05", "--gamma", "0.9"]),
        ("grpo", []),
        ("grpo", ["--loss_type", "grpo", "--max_grad_norm", "0.05", "--grpo_beta", "0"]),
        ("grpo", ["--grpo_kl", "k3", "--scale_rewards", "group"]),
        ("grpo", ["--loss_type", "dr_grpo", "--scale_rewards", "batch"]),
    ],
)
def test_update_in_loops_where_the_clip_acts(stage, flags, monkeypatch):
    shapes = ["--num_prompts", "3", "--group_size", "3", "--minibatch_size", "4"]
    trainer = make_trainer(stage, *shapes, "--temperature", "0.7", "--context", "24", *flags)
    sgd(trainer)
    real, seen = tg.sample_batch, []

    def sample_batch(*inputs):
        batch = real(*inputs)
        batch.logp_old += 0.3 * torch.randn_like(batch.logp_old) * batch.mask
        seen.extend([batch, trainer.generator.get_state(), inputs[1]])
        return batch

    slow = copy.copy(trainer)
    slow.actor, slow.critic = copy.deepcopy(trainer.actor), copy.deepcopy(trainer.critic)
    slow.parts = {}
    before = weights(trainer.actor)
    monkeypatch.setattr(tg, "sample_batch", sample_batch)
    row = tg.update_rl(trainer)
    batch, state, prompts = seen
    assert [prompts[3 * k] for k in range(3) for _ in range(3)] == prompts  # groups
    rows = rl_transcription(slow, batch, state)
    assert len(rows) == 2 * 3 and (weights(trainer.actor) - before).abs().max() > 1e-4
    close(weights(trainer.actor), weights(slow.actor), 1e-6)
    if stage == "ppo":
        close(weights(trainer.critic), weights(slow.critic), 1e-6)
    for name in rows[0]:
        assert row[name] == pytest.approx(statistics.mean(r[name] for r in rows), rel=1e-6), name
    assert 0.1 < row["losses/clipfrac"] < 0.9
    scores = tg.prepare_inputs(slow, batch)[0].tolist()
    assert row["score/mean"] == pytest.approx(statistics.mean(scores))
    assert (row["score/min"], row["score/max"]) == pytest.approx((min(scores), max(scores)))
    groups = [scores[k : k + 3] for k in (0, 3, 6)]
    assert row["group/reward_std"] == pytest.approx(
        statistics.mean(statistics.stdev(group) for group in groups)
    )
    lengths = batch.mask.sum(dim=1).tolist()
    assert row["charts/episodic_length"] == pytest.approx(statistics.mean(lengths))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_groups_advantage_reaches_all_characters(scale):
    trainer = make_trainer("grpo", "--scale_rewards", scale)
    batch = text_batch(trainer)
    scores, advantages, _ = tg.prepare_inputs(trainer, batch)
    expected = tg.compute_grpo(scores.view(3, 4), scale).flatten()
    assert advantages.shape == batch.mask.shape and expected.abs().min() > 0
    for t in range(advantages.shape[1]):
        assert torch.equal(advantages[:, t], expected)


def test_sft_loss_in_loops():
    trainer = make_trainer("sft")
    state = trainer.generator.get_state()
    before = copy.deepcopy(trainer.actor)
    row = tg.update_sft(trainer)
    trainer.generator.set_state(state)
    terms, texts = [], sorted(trainer.train_ids, key=len)
    first = trainer.draw(len(texts), 1)[0]
    for k in range(first, first + 8):
        ids = texts[k % len(texts)]
        assert ids[-1] == tg.EOS
        terms += [loop_logp(before, ids, t, 1.0).item() for t in range(len(ids) - 1)]
    assert row["losses/policy_loss"] == pytest.approx(-statistics.mean(terms))


def test_sft_batches_take_every_review_equally_often(monkeypatch):
    """Neighbours by length from each start: each review is in as many batches, the ends, too."""
    trainer, seen = make_trainer("sft"), Counter()
    monkeypatch.setattr(tg, "score_tokens", lambda model, ids: (None, None))
    real = tg.pack
    for first in range(len(trainer.train)):
        monkeypatch.setattr(trainer, "draw", lambda high, number, k=first: [k])

        def spy(rows, device):
            seen.update(tuple(row) for row in rows)
            return real(rows, device)

        monkeypatch.setattr(tg, "pack", spy)
        with pytest.raises(TypeError):
            tg.update_sft(trainer)  # no scores, no loss
    copies = Counter(map(tuple, trainer.train_ids))
    assert seen == Counter({row: 8 * n for row, n in copies.items()})


@pytest.mark.parametrize("kind", ["bce", "bradley_terry"])
def test_rm_loss_in_loops(kind):
    trainer = make_trainer("rm", "--rm_loss", kind)
    state = trainer.generator.get_state()
    before = copy.deepcopy(trainer.reward_model)
    row = tg.update_rm(trainer)
    trainer.generator.set_state(state)
    read = lambda ids: before(torch.tensor([ids]))[0, -1].item()  # noqa: E731
    losses, right = [], []
    if kind == "bce":
        for k in trainer.draw(len(trainer.train), 8):
            score, label = read(trainer.train_ids[k]), trainer.train[k].positive
            losses.append(math.log1p(math.exp(-score if label else score)))
            right.append((score > 0) == label)
    else:
        for good, bad in trainer.draw_pairs(4):
            losses.append(math.log1p(math.exp(read(bad) - read(good))))
            right.append(read(good) > read(bad))
            texts = [trainer.vocabulary.decode(ids).partition("：") for ids in (good, bad)]
            assert texts[0][0] == texts[1][0]  # one category
            assert [tg.judge(text) for *_, text in texts] == [1, -1]
        assert len(losses) == 4
    assert row["losses/policy_loss"] == pytest.approx(statistics.mean(losses))
    assert row["losses/accuracy"] == pytest.approx(statistics.mean(right))


def test_pairs_come_from_categories_with_both_labels(tmp_path):
    rows = [f"酒店,{k % 2},好{k}" for k in range(30)]
    rows += [f"{'水果' if k % 2 else '衣服'},{k % 2},好{k}" for k in range(30)]
    path = write(tmp_path / "a.csv", "\n".join(["cat,label,review", *rows]))
    trainer = make_trainer("rm", "--csv", path)
    assert trainer.categories == ["水果", "衣服", "酒店"]
    prompt = trainer.vocabulary.prompt("酒店")
    for good, bad in trainer.draw_pairs(50):
        assert good[:4] == bad[:4] == prompt


@pytest.mark.parametrize("source", ["policy", "data"])
def test_dpo_loss_in_loops(source):
    flags = ["--dpo_pairs", source, "--dpo_beta", "0.4", "--dpo_alpha", "0.7"]
    trainer = make_trainer("dpo", *flags, "--max_grad_norm", "1e9", "--temperature", "0.7")
    trainer.step, trainer.steps = 1, 2
    state = trainer.generator.get_state()
    before = copy.deepcopy(trainer.actor)
    row = tg.update_dpo(trainer)
    trainer.generator.set_state(state)
    if source == "data":
        pairs = trainer.draw_pairs(6)
        assert not trainer.pairs  # none are sampled
    else:
        pairs = [trainer.pairs[k] for k in trainer.draw(len(trainer.pairs), 6)]

    def log_prob(model, ids):
        return sum(loop_logp(model, ids, t, 0.7) for t in range(3, len(ids) - 1))

    losses, rewards, nll = [], [], 0.0
    for pair in pairs:
        policy = [log_prob(before, ids) for ids in pair]
        with torch.no_grad():
            reference = [log_prob(trainer.reference, ids) for ids in pair]
        gap = policy[0] - policy[1] - (reference[0] - reference[1])
        losses.append(-torch.nn.functional.logsigmoid(0.4 * gap))
        rewards.append([0.4 * (p - r).item() for p, r in zip(policy, reference, strict=True)])
        nll = nll - policy[0]
    nll = nll / sum(len(good) - 4 for good, _ in pairs)
    total = sum(losses) / len(losses) + 0.7 * nll
    grads = torch.autograd.grad(total, [*before.parameters()], allow_unused=True)
    norm = math.sqrt(sum(g.square().sum().item() for g in grads if g is not None))
    assert row["losses/policy_loss"] == pytest.approx((sum(losses) / len(losses)).item())
    assert row["losses/grad_norm"] == pytest.approx(norm)
    assert row["dpo/margin"] == pytest.approx(statistics.mean(w - b for w, b in rewards))
    assert row["dpo/accuracy"] == pytest.approx(statistics.mean(w > b for w, b in rewards))
    assert row["dpo/reward_chosen"] == pytest.approx(statistics.mean(w for w, _ in rewards))
    assert row["dpo/reward_rejected"] == pytest.approx(statistics.mean(b for _, b in rewards))


def test_scores_are_standardised_and_pairs_ordered():
    """Over the SFT model's own texts; of each prompt's texts, the best and the worst."""
    flags = ["--dpo_pairs", "policy", "--dpo_texts", "64", "--dpo_candidates", "4"]
    trainer = make_trainer("dpo", *flags)
    assert len(trainer.pairs) == 16
    trainer.reward_model.float()
    trainer.reference.float()
    generator = torch.Generator().manual_seed(trainer.args.seed)
    prompts = [p for p in trainer.prompts(16) for _ in range(4)]
    batch = tg.sample_batch(trainer.reference, prompts, 48, 0.8, generator)
    scores = trainer.score(batch.ids)
    assert scores.mean().item() == pytest.approx(0, abs=1e-5)
    assert scores.std().item() == pytest.approx(1, abs=1e-5)
    texts = [[i for i in row if i != tg.PAD] for row in batch.ids.tolist()]
    for k, (best, worst) in enumerate(trainer.pairs):
        group = scores[4 * k : 4 * k + 4].tolist()
        assert best == texts[4 * k + group.index(max(group))]
        assert worst == texts[4 * k + group.index(min(group))]
        assert best[:4] == worst[:4] == prompts[4 * k] and max(group) > min(group)


def test_scores_are_standardised_alike_in_all_stages():
    """Whatever DPO's pairs are made of."""
    found = []
    for stage, number in (("ppo", "2"), ("ppo", "4"), ("dpo", "4")):
        flags = ["--dpo_pairs", "data", "--dpo_candidates", number, "--dpo_texts", "8"]
        trainer = make_trainer(stage, *flags)
        trainer.look_at_sft()
        found.append((trainer.shift, trainer.spread))
    assert found[0] == found[1] == found[2] and found[0][1] > 0


def test_what_starts_from_what():
    """Actor and reference: the SFT model; the critic: the reward model; only parts are trained."""
    args = make_args("--dpo_pairs", "policy")
    data = tg.load_data(args)
    given = tg.load_given(args, data)
    size = 4 + len(given["characters"])
    given["sft"] = random_gpt(args, size, seed=1).state_dict()
    trainer = tg.Trainer(args, "rm", dict(given), data)
    assert same(trainer.reward_model.state_dict(), given["sft"]) is False
    assert trainer.parts.keys() == {"reward_model", "optimizer"}
    for name, tensor in given["sft"].items():
        assert torch.equal(trainer.reward_model.state_dict()[name], tensor)
    given["rm"] = random_gpt(args, size, True, seed=2).state_dict()
    for stage in ("ppo", "grpo", "dpo"):
        trainer = tg.Trainer(args, stage, given, data)
        assert same(dict(trainer.actor.state_dict()), dict(given["sft"]))
        assert len(trainer.pairs) == (8 if stage == "dpo" else 0)
        kept = copy.deepcopy((trainer.reference, trainer.reward_model))
        if stage == "ppo":
            assert same(dict(trainer.critic.state_dict()), dict(given["rm"]))
        for _ in range(2):
            tg.UPDATES[stage](trainer)
            trainer.step += 1
        assert torch.equal(weights(trainer.reference), weights(kept[0]))
        assert torch.equal(weights(trainer.reward_model), weights(kept[1]))
        assert not torch.equal(weights(trainer.actor), weights(kept[0]))
        if stage == "ppo":
            assert not torch.equal(weights(trainer.critic), weights(kept[1]))


@pytest.mark.parametrize("stage", RL)
def test_the_ratio_is_one_in_the_first_step_only(stage):
    for epochs, rate in (("1", "1e-2"), ("4", "1e-2")):
        flags = ["--update_epochs", epochs, f"--{stage}_rate", rate]
        trainer = make_trainer(stage, *flags, "--minibatch_size", "100")
        row = tg.update_rl(trainer)
        assert (row["losses/approx_kl"] > 1e-9) == (epochs == "4")
        assert row["losses/clipfrac"] == 0 or epochs == "4"


def test_the_learning_rate():
    """A warm-up from 5%, then linearly to 0. AdamW's settings."""
    trainer, seen = make_trainer("sft", "--sft_steps", "100", "--sft_rate", "0.01"), []
    for _ in range(100):
        tg.update_sft(trainer)
        trainer.step += 1
        seen.append(trainer.optimizer.param_groups[0]["lr"])
    expected = [0.01 * min(1, 0.05 + k / 5) * (1 - k / 100) for k in range(100)]
    assert seen == pytest.approx(expected)
    (group,) = trainer.optimizer.param_groups
    assert group["betas"] == (0.9, 0.99) and group["weight_decay"] == 0.01


def test_first_weights():
    """Embeddings and layers of std 0.02, so that the first policy is nearly uniform."""
    torch.manual_seed(0)
    model = tg.GPT(make_args("--width", "64"), 150)
    assert all(0.018 < p.std() < 0.022 for p in model.parameters() if p.dim() > 1)
    logits = model(torch.randint(150, (4, 20)))
    assert logits.std() < 0.3


def test_each_network_is_clipped_by_itself():
    trainer = make_trainer("ppo", "--max_grad_norm", "1e-3", "--minibatch_size", "100")
    tg.update_rl(trainer)
    for model in (trainer.actor, trainer.critic):
        assert slope(model).norm().item() == pytest.approx(1e-3, rel=1e-2)


# ---- 6  learning ---------------------------------------------------------------------------------


def train(*flags: str, tmp_path: Path) -> tuple[dict, list[dict], Path]:
    result = tg.train(make_args(*SHORT, "--output_dir", str(tmp_path), *flags))
    folder = Path(result["run_dir"])
    stages = [path for path in folder.iterdir() if path.is_dir()]
    return result["stages"], metrics(stages[0]) if len(stages) == 1 else [], folder


def state(folder: Path, name="checkpoint-last.pt") -> dict:
    """A checkpoint, less the clock, its flags and the models it was given."""
    found = tg.load_checkpoint(str(folder / name))
    found["counters"] = found["counters"][0]
    del found["config"]
    return found


@pytest.fixture(scope="session")
def learnt(tmp_path_factory) -> Path:
    """SFT and reward model of a grammar, trained for a few seconds."""
    folder = tmp_path_factory.mktemp("learnt")
    flags = ["--sft_steps", "150", "--sft_batch", "16", "--sft_rate", "0.02", "--reviews", "1000"]
    flags += ["--evaluations", "1", "--rm_steps", "200", "--rm_rate", "0.01", "--rm_batch", "32"]
    train("--stage", "sft", "--run_name", "s", *flags, tmp_path=folder)
    sft = folder / tg.SCRIPT / "s" / "sft" / "checkpoint-last.pt"
    for kind in ("bce", "bradley_terry"):
        more = ["--sft_checkpoint", str(sft), "--rm_loss", kind]
        train("--stage", "rm", "--run_name", kind, *flags, *more, tmp_path=folder)
    return folder / tg.SCRIPT


def test_sft_learns(learnt):
    rows = metrics(learnt / "s" / "sft")
    first, last = (statistics.mean(r["losses/policy_loss"] for r in part)
                   for part in (rows[:5], rows[-20:]))  # fmt: skip
    assert first > 3.5 and last < 0.6 * first
    assert rows[-1]["eval/perplexity"] < 15 and rows[-1]["eval/stopped"] > 0.5


@pytest.mark.parametrize("kind", ["bce", "bradley_terry"])
def test_rm_learns(kind, learnt):
    rows = metrics(learnt / kind / "rm")
    assert rows[-1]["eval/pair_accuracy"] > 0.75
    early, late = (statistics.mean(r["losses/accuracy"] for r in part)
                   for part in (rows[:20], rows[-20:]))  # fmt: skip
    assert early < 0.7 < late


def policy_run(learnt, tmp_path, stage: str, *flags: str) -> tuple[dict, list[dict]]:
    paths = ["--sft_checkpoint", str(learnt / "s/sft/checkpoint-last.pt"), "--rm_checkpoint"]
    paths += [str(learnt / "bradley_terry/rm/checkpoint-last.pt"), "--reviews", "1000"]
    flags = ["--eval_texts", "50", "--evaluations", "1", "--dpo_texts", "256", *flags]
    flags += ["--num_prompts", "8", "--minibatch_size", "32", "--stage", stage]
    stages, rows, _ = train(*paths, *flags, tmp_path=tmp_path)
    return stages[stage], rows


@pytest.mark.parametrize("stage", ["ppo", "grpo", "dpo"])
def test_the_score_rises(stage, learnt, tmp_path):
    flags = [f"--{stage}_steps", "15" if stage in RL else "40", f"--{stage}_rate", "4e-3"]
    result, rows = policy_run(learnt, tmp_path, stage, *flags)
    assert result["rm_score"] > 0.4 and result["kl_text"] > 0.05
    if stage == "dpo":
        margins = [row["dpo/margin"] for row in rows]
        assert abs(margins[0]) < 1e-4 and statistics.mean(margins[-5:]) > 0.1
        assert statistics.mean(row["dpo/accuracy"] for row in rows[-10:]) > 0.6
        losses = [row["losses/policy_loss"] for row in rows]
        assert losses[0] == pytest.approx(math.log(2)) and statistics.mean(losses[-5:]) < 0.68


@pytest.mark.parametrize("stage,flag", [("ppo", "--beta"), ("grpo", "--grpo_beta")])
def test_beta_holds_the_policy_at_the_reference(stage, flag, learnt, tmp_path):
    kl = []
    for beta in ("0", "30"):
        flags = [f"--{stage}_steps", "8", f"--{stage}_rate", "4e-3", flag, beta]
        kl.append(policy_run(learnt, tmp_path, stage, *flags)[0]["kl_text"])
    assert kl[1] < 0.25 * kl[0]


# ---- 7  evaluation -------------------------------------------------------------------------------


def test_evaluation_in_loops():
    trainer = make_trainer("grpo", "--eval_texts", "12", "--temperature", "0.7")
    found = tg.evaluate(trainer)
    assert found == tg.evaluate(trainer)  # the same draws
    generator = torch.Generator().manual_seed(2**31)
    batch = tg.sample_batch(trainer.actor, trainer.prompts(12), 48, 0.7, generator)
    texts = [trainer.vocabulary.decode(row) for row in batch.ids.tolist()]
    assert trainer.samples == texts
    terms = []
    for ids in trainer.test_ids:
        terms += [loop_logp(trainer.actor, ids, t, 1.0).item() for t in range(len(ids) - 1)]
    k3 = []
    for row, mask in zip(batch.ids.tolist(), batch.mask, strict=True):
        text = [i for i in row if i != tg.PAD]
        away = [
            loop_logp(trainer.reference, text, t, 0.7).item()
            - loop_logp(trainer.actor, text, t, 0.7).item()
            for t in mask.nonzero().flatten().tolist()
        ]
        k3.append([math.exp(x) - x - 1 for x in away])
    pairs = [text[3:][k : k + 2] for text in texts for k in range(len(text[3:]) - 1)]
    expected = {
        "perplexity": math.exp(-statistics.mean(terms)),
        "length": statistics.mean(len(row) for row in k3),
        "stopped": statistics.mean(tg.EOS in row for row in batch.ids.tolist()),
        "distinct_2": len(set(pairs)) / len(pairs),
        "different": len(set(texts)) / 12,
        "true_positive": 0.0,
        "grammatical": 0.0,
        "rm_score": trainer.score(batch.ids).mean().item(),
        "kl_token": sum(map(sum, k3)) / sum(map(len, k3)),
        "kl_text": statistics.mean(map(sum, k3)),
    }
    assert found == pytest.approx({f"eval/{k}": v for k, v in expected.items()})


def test_true_rates(monkeypatch):
    trainer = make_trainer("sft")
    texts = ["酒店：房间脏。", "酒店：房间不脏。", "酒店：很满意。", "酒店：房间"]
    rows = [[tg.BOS, *(trainer.vocabulary.index.get(c, 3) for c in t), tg.EOS] for t in texts]
    ids = tg.pack(rows, CPU)
    mask = tg.chosen_mask(ids, trainer.vocabulary.index["："])
    batch = tg.Batch(ids, mask, torch.tensor([True, True, True, False]), torch.zeros(mask.shape))
    monkeypatch.setattr(tg, "sample_batch", lambda *_: batch)
    found = tg.evaluate(trainer)
    assert found["eval/true_positive"] == 0.5 and found["eval/grammatical"] == 0.75
    assert found["eval/stopped"] == 0.75 and found["eval/different"] == 1
    assert not {"eval/rm_score", "eval/kl_text"} & found.keys()


def test_judged_scores_in_loops():
    trainer = make_trainer("rm")
    found = tg.evaluate(trainer)
    scores = [trainer.reward_model(torch.tensor([ids]))[0, -1].item() for ids in trainer.test_ids]
    labels = [review.positive for review in trainer.test]
    both = list(zip(scores, labels, strict=True))
    ranked = [a > b for a, x in both if x for b, y in both if not y]
    assert found == pytest.approx(
        {
            "eval/accuracy": statistics.mean((s > 0) == y for s, y in both),
            "eval/pair_accuracy": statistics.mean(ranked),
        }
    )


# ---- 8  run folder, checkpoints, resume ----------------------------------------------------------


def short(folder: Path, name: str, *flags: str) -> list[str]:
    every = ["--run_name", name, "--save_steps", "2", "--output_dir", str(folder)]
    return [*TINY, *SHORT, *every, "--quiet", *flags]


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """All stages, a few updates each."""
    folder = tmp_path_factory.mktemp("run")
    assert tg.main(short(folder, "all")) == 0
    return folder / tg.SCRIPT / "all"


@pytest.mark.parametrize("number,expected", [("1", [5]), ("2", [3, 5]), ("9", [1, 2, 3, 4, 5])])
def test_a_stage_is_evaluated_so_often(number, expected, tmp_path):
    """And at its end, once."""
    flags = [*TINY, "--stage", "sft", "--sft_steps", "5", "--evaluations", number, "--quiet"]
    assert tg.main([*flags, "--output_dir", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("metrics.jsonl")
    assert [row["step"] for row in metrics(path.parent) if "eval/perplexity" in row] == expected


def test_run_folder_and_tags(run):
    assert {path.name for path in run.iterdir()} == {*tg.STAGES}
    for stage, steps in STEPS.items():
        folder = run / stage
        names = {path.name for path in folder.iterdir() if not path.name.startswith("events")}
        numbers = {f"checkpoint-{k:06d}.pt" for k in range(2, steps + 1, 2)}
        assert names == {"config.json", "metrics.jsonl", "checkpoint-last.pt"} | numbers
        config = json.loads((folder / "config.json").read_text())
        assert config["stage"] == "all" and config["seed"] == 42 and config["width"] == 16
        assert config["torch"] == torch.__version__
        losses = {"losses/policy_loss", "losses/grad_norm"}
        expected = losses | {"charts/learning_rate", "charts/train_seconds"}
        if stage == "rm":
            expected |= {"losses/accuracy"}
        if stage in RL:
            expected |= {f"losses/{k}" for k in ("entropy", "approx_kl", "clipfrac")}
            expected |= {"score/mean", "score/max", "score/min", "charts/episodic_length"}
            expected |= {"group/reward_std", "group/zero_std_frac"}
        if stage == "ppo":
            expected |= {"losses/value_loss"}
        if stage == "dpo":
            expected |= {"dpo/margin", "dpo/accuracy", "dpo/reward_chosen", "dpo/reward_rejected"}
        told = ["perplexity", "length", "stopped", "distinct_2", "different"]
        told += ["true_positive", "grammatical"]
        told += ["rm_score", "kl_token", "kl_text"] if stage not in ("sft", "rm") else []
        told = ["accuracy", "pair_accuracy"] if stage == "rm" else told
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line, parse_constant=lambda x: pytest.fail(x)) for line in lines]
        assert [row["step"] for row in rows] == [*range(1, steps + 1)]
        for row in rows:
            due = row["step"] in (math.ceil(steps / 2), steps)
            more = {f"eval/{name}" for name in told} if due else set()
            assert row.keys() == expected | more | {"step"}
        events = events_of(folder, tensors=0)
        tags = {f"{kind}/{name}" for name in told for kind in ("eval", "hparam")}
        assert set(events.Tags()["scalars"]) == expected | tags
        values = [(e.step, e.value) for e in events.Scalars("losses/policy_loss")]
        assert values == [
            (row["step"], pytest.approx(row["losses/policy_loss"], rel=1e-5)) for row in rows
        ]
        if stage != "rm":
            texts = events.Tensors("samples/text_summary")
            assert len(texts) >= 2 and texts[-1].step == steps
            lines = texts[-1].tensor_proto.string_val[0].decode().split("  \n")
            assert all("：" in "".join(lines) for _ in lines) and len(lines) <= 10
        found = tg.load_checkpoint(str(folder / "checkpoint-last.pt"))
        assert found["stage"] == stage and found["counters"][0] == steps


def test_stages_one_by_one(run, tmp_path):
    """Each stage on the checkpoints of those before, equal to the bit to all at once."""
    root = tmp_path / tg.SCRIPT
    paths: list[str] = []
    for stage in tg.STAGES:
        assert tg.main(short(tmp_path, stage, "--stage", stage, *paths)) == 0
        assert same(state(root / stage / stage), state(run / stage))
        assert metrics(root / stage / stage) == metrics(run / stage)
        if stage in ("sft", "rm"):
            paths += [f"--{stage}_checkpoint", str(root / stage / stage / "checkpoint-last.pt")]


def test_resume_of_a_finished_stage_tells_its_end(run):
    """Nothing is left to do but to evaluate."""
    rows = metrics(run / "dpo")
    args = tg.parse_args(["--resume", str(run / "dpo" / "checkpoint-last.pt"), "--quiet"])
    found = tg.train(args)["stages"]["dpo"]
    assert found == {name[5:]: value for name, value in rows[-1].items() if name[:5] == "eval/"}
    assert metrics(run / "dpo") == rows


@pytest.mark.parametrize(
    "old,new", [("好7", "坏7"), ("1,不好7", "0,不好7"), ("店,1,不好7", "书,1,不好7")]
)
def test_resume_with_other_reviews_is_refused(old, new, tmp_path, capsys):
    """A file that changed since the checkpoint, be it one label, would go on as another run."""
    rows = [f"酒店,{k % 2},{'不' * (k % 2)}好{k}" for k in range(40)]
    path = write(tmp_path / "a.csv", "\n".join(["cat,label,review", *rows]))
    flags = [*TINY, "--csv", path, "--stage", "sft", "--sft_steps", "4", "--save_steps", "2"]
    assert tg.main([*flags, "--quiet", "--output_dir", str(tmp_path)]) == 0
    (checkpoint,) = tmp_path.rglob("checkpoint-000002.pt")
    assert tg.main(["--resume", str(checkpoint), "--quiet"]) == 0
    write(tmp_path / "a.csv", Path(path).read_text(encoding="utf-8").replace(old, new))
    assert tg.main(["--resume", str(checkpoint), "--quiet"]) == 2
    assert "a.csv has changed since" in capsys.readouterr().err


@pytest.mark.parametrize("stage", tg.STAGES)
def test_resume_equals_never_stopping(stage, run, tmp_path, monkeypatch):
    """From the middle of each stage: the rest of it, and all stages after it."""
    folder, k = tmp_path / "half", tg.STAGES.index(stage)
    for name in tg.STAGES[:k]:
        (folder / name).mkdir(parents=True)
    (folder / stage).mkdir(parents=True)
    shutil.copy(run / stage / "metrics.jsonl", folder / stage)
    path = folder / stage / "checkpoint-000002.pt"
    old = tg.load_checkpoint(str(run / stage / path.name))
    torch.save(old | {"counters": (old["counters"][0], 1000.0)}, path)
    done = []
    for name, update in tg.UPDATES.items():
        call = lambda t, u=update: done.append(t.stage) or u(t)  # noqa: E731
        monkeypatch.setitem(tg.UPDATES, name, call)
    assert tg.main(["--resume", str(path), "--quiet"]) == 0
    expected = {s: STEPS[s] - 2 * (s == stage) for s in tg.STAGES[k:]}
    assert {s: done.count(s) for s in {*done}} == expected
    for name in tg.STAGES[k:]:
        assert metrics(folder / name) == metrics(run / name)
        for checkpoint in (run / name).glob("*.pt"):
            assert same(state(run / name, checkpoint.name), state(folder / name, checkpoint.name))
    last = folder / stage / "checkpoint-last.pt"
    assert 0 < seconds(run / stage / path.name) < 1000 < seconds(last)  # they add up


def interrupt_at(monkeypatch, stage: str, *updates: int) -> None:
    """Ctrl-C during these updates of a stage, as a signal."""
    real, calls = tg.UPDATES[stage], []

    def update(trainer):
        if trainer.stage == stage:
            calls.append(1)
            if len(calls) in updates:
                signal.raise_signal(signal.SIGINT)
        return real(trainer)

    monkeypatch.setitem(tg.UPDATES, stage, update)


@pytest.mark.parametrize("stage,update", [("sft", 6), ("grpo", 2)])
def test_interrupt_saves_and_resumes_exactly(stage, update, run, tmp_path, monkeypatch, capsys):
    """After a stage's last update, too: resuming goes on with the next stage."""
    flags = [flag for flag in short(tmp_path, "a") if flag != "--quiet"]
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(patch, stage, update)
        assert tg.main(flags) == 130
    assert signal.getsignal(signal.SIGINT) is before
    folder = tmp_path / tg.SCRIPT / "a"
    path = folder / stage / "checkpoint-last.pt"
    text = capsys.readouterr().out
    assert f"go on: python {tg.SCRIPT}.py --resume {path}" in text
    assert state(path.parent)["counters"] == update
    assert {x.name for x in folder.iterdir()} == {*tg.STAGES[: tg.STAGES.index(stage) + 1]}
    assert tg.main(["--resume", str(path), "--quiet"]) == 0
    for name in tg.STAGES:
        assert same(state(folder / name), state(run / name))
        assert [row["step"] for row in metrics(folder / name)] == [*range(1, STEPS[name] + 1)]


def test_a_second_interrupt_stops_at_once(tmp_path, monkeypatch, capsys):
    interrupt_at(monkeypatch, "sft", 3, 4)
    real = tg.UPDATES["sft"]
    monkeypatch.setitem(tg.UPDATES, "sft", lambda t: (real(t), real(t))[1])
    assert tg.main(short(tmp_path, "a", "--stage", "sft")) == 130
    assert "stopped at once" in capsys.readouterr().err


def test_interrupt_in_the_last_update_of_all_stops_nothing(tmp_path, monkeypatch):
    interrupt_at(monkeypatch, "sft", 6)
    assert tg.main(short(tmp_path, "a", "--stage", "sft")) == 0


def test_training_in_a_thread(tmp_path):
    """Signals can be set in the main thread only."""
    args, results = tg.parse_args(short(tmp_path, "a", "--stage", "sft")), []
    thread = threading.Thread(target=lambda: results.append(tg.train(args)))
    thread.start()
    thread.join()
    assert results[0]["stages"].keys() == {"sft"} and not results[0]["stopped"]


def test_another_seed_gives_another_run(run, tmp_path):
    """The same seed: test_stages_one_by_one."""
    flags = ["--stage", "sft", "--max_steps", "2", "--seed", "7"]
    assert tg.main(short(tmp_path, "a", *flags)) == 0
    other = state(tmp_path / tg.SCRIPT / "a" / "sft")
    one = state(run / "sft", "checkpoint-000002.pt")
    assert other["counters"] == one["counters"] == 2
    assert not torch.equal(other["generators"], one["generators"])
    weight = "blocks.0.qkv.weight"
    assert not torch.equal(*(x["parts"]["actor"][weight] for x in (one, other)))


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys, run):
    folder = tmp_path / "a"
    shutil.copytree(run, folder)
    path = folder / "dpo" / "checkpoint-000004.pt"  # what is saved first
    flags = ["--resume", str(folder / "dpo/checkpoint-000002.pt")]
    assert "dpo" in check_full_disk(tg, path, flags, monkeypatch, capsys)


NAN = [("sft", "score_tokens", "loss"), ("rm", "read_scores", "loss"), ("ppo", "whiten", "advant")]
NAN += [("grpo", "compute_grpo", "advantages"), ("dpo", "dpo_loss", "loss")]


@pytest.mark.parametrize("stage,name,tensor", NAN)
def test_nan_names_stage_update_and_tensor(stage, name, tensor, tmp_path, monkeypatch, capsys, run):
    """And moves no weight."""
    real, where, update = getattr(tg, name), [0], tg.UPDATES[stage]

    def broken(*args):
        result = real(*args)
        if where[0] != 3:
            return result
        return (result[0] * math.nan, result[1]) if isinstance(result, tuple) else result * math.nan

    def counted(trainer):
        where[0] = trainer.step + 1
        return update(trainer)

    monkeypatch.setattr(tg, name, broken)
    monkeypatch.setitem(tg.UPDATES, stage, counted)
    paths = {"sft": [], "rm": ["sft"]}.get(stage, ["sft", "rm"])
    flags = [x for s in paths for x in (f"--{s}_checkpoint", str(run / s / "checkpoint-last.pt"))]
    assert tg.main(short(tmp_path, "a", "--stage", stage, "--save_steps", "1", *flags)) == 1
    error = capsys.readouterr().err
    assert f"{stage}, update 3: {tensor}" in error and "is NaN" in error
    assert error.count("\n") == 1 and str(tmp_path) in error
    folder = tmp_path / tg.SCRIPT / "a" / stage
    assert state(folder)["counters"] == 2
    assert [row["step"] for row in metrics(folder)] == [1, 2]


def test_nan_moves_no_weight(monkeypatch):
    trainer = make_trainer("sft")
    before, real = weights(trainer.actor), tg.score_tokens
    monkeypatch.setattr(tg, "score_tokens", lambda *a: (real(*a)[0] * math.nan, None))
    with pytest.raises(FloatingPointError, match="loss is NaN"):
        tg.update_sft(trainer)
    assert torch.equal(weights(trainer.actor), before)
    steep = lambda x: x + 0 * (x * 0).sqrt()  # noqa: E731 - finite, its slope is not
    monkeypatch.setattr(tg, "score_tokens", lambda *a: (steep(real(*a)[0]), None))
    with pytest.raises(FloatingPointError, match="gradient is NaN"):
        tg.update_sft(trainer)
    assert torch.equal(weights(trainer.actor), before)


def test_a_run_is_never_overwritten(tmp_path):
    for _ in range(2):
        assert tg.main(short(tmp_path, "a", "--stage", "sft", "--max_steps", "1")) == 0
    assert {path.name for path in (tmp_path / tg.SCRIPT).iterdir()} == {"a", "a-2"}


def test_generators_of_another_kind_of_device_are_left_as_they_are(tmp_path):
    trainer = make_trainer("sft")
    trainer.save_model(tmp_path / "a.pt")
    checkpoint = tg.load_checkpoint(str(tmp_path / "a.pt"))
    checkpoint["generators"] = torch.zeros(16, dtype=torch.uint8)
    torch.save(checkpoint, tmp_path / "b.pt")
    before = trainer.generator.get_state()
    trainer.load_model(str(tmp_path / "b.pt"))
    assert torch.equal(before, trainer.generator.get_state())


def test_result_and_summary(tmp_path):
    args = tg.parse_args(short(tmp_path, "a", "--max_steps", "1"))
    result = tg.train(args)
    lines, folder = tg.summary(result, args).splitlines(), tmp_path / tg.SCRIPT / "a"
    assert [line.split()[0] for line in lines[1:5]] == POLICIES
    assert "truly positive" in lines[0] and "KL / text" in lines[0] and "RM score" in lines[0]
    assert lines[5].startswith("reward model, held-out reviews: ")
    assert lines[6].startswith("not solved: truly positive at least 0.0% (threshold 90%)")
    assert lines[-1] == f"logs: {folder}    watch: tensorboard --logdir {tmp_path}"
    assert result["stages"].keys() == {*tg.STAGES} and not result["stopped"]
    for stage, row in result["stages"].items():
        last = metrics(folder / stage)[-1]
        if stage == "sft":  # evaluated again, by the reward model, too
            assert row["kl_text"] == 0 and "rm_score" in row
            row = {k: v for k, v in row.items() if f"eval/{k}" in last}
        evaluated = {k: v for k, v in last.items() if k.startswith("eval/")}
        assert {f"eval/{k}": v for k, v in row.items()} == evaluated
    result["stages"] = {s: {"true_positive": 0.9} for s in ("ppo", "grpo")}
    text = tg.summary(result, make_args())
    assert "\nsolved: truly positive at least 90.0%" in text
    result["stages"]["ppo"] = {"true_positive": 0.89}
    assert "not solved: truly positive at least 89.0%" in tg.summary(result, make_args())


def test_infer(run, capsys):
    path = run / "ppo" / "checkpoint-last.pt"
    before = path.read_bytes(), sorted(path.parent.iterdir())
    texts = []
    for flags in ([], [], ["--seed", "5"], ["--temperature", "0.3"]):
        assert tg.main(["--infer", str(path), *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len({*texts}) == 3
    saved = tg.load_checkpoint(str(path))
    args = argparse.Namespace(**saved["config"])
    trainer = tg.Trainer(args, "sft", {"characters": saved["given"]["characters"]}, ([], []))
    trainer.actor.load_state_dict(saved["parts"]["actor"])
    generator = torch.Generator().manual_seed(args.seed)
    prompts = [trainer.vocabulary.prompt(line.partition("：")[0]) for line in texts[0].splitlines()]
    batch = tg.sample_batch(trainer.actor, prompts, args.context, args.temperature, generator)
    written = [line.rpartition("  (")[0] for line in texts[0].splitlines()]
    assert written == [trainer.vocabulary.decode(row) for row in batch.ids.tolist()]
    for line in texts[0].splitlines():
        review, _, word = line.rpartition("  (")
        truth = {"positive)": 1, "negative)": -1, "no review)": 0}[word]
        assert tg.judge(review.partition("：")[2]) == truth
    assert texts[0].count("review)") + texts[0].count("tive)") == 10
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before


# ---- 9  CSV runs ---------------------------------------------------------------------------------


def csv_of(path: Path, number=120) -> str:
    rng = random.Random(3)
    reviews = [tg.write_review(rng) for _ in range(number)]
    rows = [f"{r.category},{int(r.positive)},{r.text}" for r in reviews]
    return write(path, "\n".join(["cat,label,review", *rows, "酒店,x,好", f"酒店,1,{'好' * 99}"]))


def test_run_on_a_csv(tmp_path, capsys):
    path = csv_of(tmp_path / "a.csv")
    flags = [f for f in short(tmp_path, "a", "--csv", path, "--max_steps", "2") if f != "--quiet"]
    assert tg.main(flags) == 0
    text = capsys.readouterr().out
    assert "120 reviews; skipped: 1 unlabelled, 1 too long" in text
    assert "truly positive" not in text and "solved" not in text
    folder = tmp_path / tg.SCRIPT / "a"
    assert "eval/true_positive" not in metrics(folder / "ppo")[-1]
    assert tg.main(["--infer", str(folder / "ppo" / "checkpoint-last.pt"), "--quiet"]) == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert "(" not in "".join(lines) and all("：" in line for line in lines)


def test_csv_without_a_category_of_both_labels(tmp_path, capsys):
    rows = [f"{'甲乙'[k % 2]},{k % 2},好好{k % 5}" for k in range(60)]
    path = write(tmp_path / "a.csv", "\n".join(["cat,label,review", *rows]))
    with pytest.raises(SystemExit) as stopped:
        tg.main(short(tmp_path, "a", "--csv", path))
    assert stopped.value.code == 2 and "argument --" in capsys.readouterr().err
    assert not (tmp_path / tg.SCRIPT).exists()


def test_csv_with_a_category_of_one_label(tmp_path):
    rows = [f"{'甲乙'[k % 2]},{k % 4 // 2 * (k % 2)},好好{k % 5}" for k in range(80)]
    path = write(tmp_path / "a.csv", "\n".join(["cat,label,review", *rows]))
    assert tg.main(short(tmp_path, "a", "--csv", path, "--rm_batch", "2")) == 0


def test_csv_with_a_colon_in_a_category(tmp_path):
    """The prompt gets no gradient from DPO: the row is skipped, or the mask starts after it."""
    path = write(tmp_path / "a.csv", "cat,label,review\n甲：乙,1,好\n")
    reviews, _ = tg.load_csv(path, 48)
    vocabulary = tg.Vocabulary("甲乙好：")
    for review in reviews:
        ids = tg.pack([vocabulary.encode(review)], CPU)
        given = len(vocabulary.prompt(review.category))
        mask = tg.chosen_mask(ids, vocabulary.index["："])
        assert mask[0].tolist() == [t + 1 >= given for t in range(mask.shape[1])]


def test_csv_with_an_open_quote(tmp_path, capsys):
    rows = ["cat,label,review", '甲,1,"好', *[f"甲,{k % 2},{'好' * 40}" for k in range(4000)]]
    path = write(tmp_path / "a.csv", "\n".join(rows))
    with pytest.raises(SystemExit) as stopped:
        tg.main(short(tmp_path, "a", "--csv", path))
    assert stopped.value.code == 2 and "argument --csv" in capsys.readouterr().err


def test_a_context_shorter_than_the_grammars_reviews(tmp_path):
    """Either they are left out, or the flag is refused."""
    try:
        assert tg.main(short(tmp_path, "a", "--context", "20")) == 0
    except SystemExit as stopped:
        assert stopped.code == 2


def test_metrics_of_few_reviews_are_numbers():
    for seed in range(6):
        found = tg.evaluate(make_trainer("rm", "--reviews", "20", "--seed", str(seed)))
        assert all(math.isfinite(value) for value in found.values())


def test_checkpoints_of_different_characters(tmp_path, capsys):
    root = tmp_path / tg.SCRIPT
    paths = []
    for name, reviews in (("a", "20"), ("b", "60")):
        flags = ["--stage", "sft", "--reviews", reviews, "--max_steps", "1"]
        assert tg.main(short(tmp_path, name, *flags)) == 0
        paths.append(str(root / name / "sft" / "checkpoint-last.pt"))
    flags = ["--stage", "rm", "--sft_checkpoint", paths[1], "--max_steps", "1"]
    assert tg.main(short(tmp_path, "c", *flags)) == 0
    rm = str(root / "c" / "rm" / "checkpoint-last.pt")
    flags = ["--stage", "grpo", "--sft_checkpoint", paths[0], "--rm_checkpoint", rm]
    with pytest.raises(SystemExit) as stopped:
        tg.main(short(tmp_path, "d", *flags))
    assert stopped.value.code == 2 and "checkpoint" in capsys.readouterr().err


# ---- 10  bad input -------------------------------------------------------------------------------

BAD = [
    ("--stage rm", "sft_checkpoint", "needed"),
    ("--stage ppo --sft_checkpoint SFT", "rm_checkpoint", "needed"),
    ("--stage dpo --rm_checkpoint RM", "sft_checkpoint", "needed"),
    ("--stage all --sft_checkpoint SFT", "sft_checkpoint", "not used"),
    ("--stage sft --rm_checkpoint RM", "rm_checkpoint", "not used"),
    ("--stage rm --sft_checkpoint SFT --rm_checkpoint RM", "rm_checkpoint", "not used"),
    ("--stage rm --sft_checkpoint RM", "sft_checkpoint", "is of stage rm"),
    ("--stage grpo --sft_checkpoint SFT --rm_checkpoint PPO", "rm_checkpoint", "stage ppo"),
    ("--stage grpo --sft_checkpoint PPO --rm_checkpoint RM", "sft_checkpoint", "stage ppo"),
    ("--stage rm --sft_checkpoint MISSING", "sft_checkpoint", "No such file"),
    ("--stage rm --sft_checkpoint TRUNCATED", "sft_checkpoint", "can't be loaded"),
    ("--stage rm --sft_checkpoint FOREIGN", "sft_checkpoint", "not a checkpoint"),
    ("--stage rm --sft_checkpoint SFT --width 32", "width", "16"),
    ("--stage rm --sft_checkpoint SFT --layers 2", "layers", "1"),
    ("--stage rm --sft_checkpoint SFT --heads 4", "heads", "2"),
    ("--stage rm --sft_checkpoint SFT --context 40", "context", "48"),
    ("--stage nonsense", "stage", "choose from"),
    ("--width 15", "heads", "does not divide"),
    ("--heads 0", "heads", ""),
    ("--layers 0", "layers", ""),
    ("--context 4", "context", ""),
    ("--reviews 10", "reviews", ""),
    ("--temperature 0", "temperature", ""),
    ("--temperature nan", "temperature", ""),
    ("--sft_steps 0", "sft_steps", ""),
    ("--sft_batch x", "sft_batch", ""),
    ("--sft_rate 2", "sft_rate", ""),
    ("--rm_loss hinge", "rm_loss", ""),
    ("--rm_batch 1", "rm_batch", ""),
    ("--group_size 1", "group_size", ""),
    ("--num_prompts 0", "num_prompts", ""),
    ("--minibatch_size 0", "minibatch_size", ""),
    ("--update_epochs 0", "update_epochs", ""),
    ("--beta -1", "beta", ""),
    ("--grpo_beta -1", "grpo_beta", ""),
    ("--clip_epsilon -0.1", "clip_epsilon", ""),
    ("--gamma 1.1", "gamma", ""),
    ("--lam -0.1", "lam", ""),
    ("--scale_rewards all", "scale_rewards", ""),
    ("--loss_type dapo", "loss_type", ""),
    ("--max_grad_norm 0", "max_grad_norm", ""),
    ("--dpo_pairs all", "dpo_pairs", ""),
    ("--dpo_candidates 1", "dpo_candidates", ""),
    ("--dpo_alpha -1", "dpo_alpha", ""),
    ("--seed 2147483648", "seed", ""),
    ("--seed -1", "seed", ""),
    ("--device nonsense", "device", "can't use nonsense"),
    ("--run_name a/b", "run_name", "one folder"),
    ("--run_name ..", "run_name", "one folder"),
    ("--csv NOWHERE", "csv", "No such file"),
    ("--csv FOLDER", "csv", "directory"),
    ("--csv COLUMNS", "csv", "no column label"),
    ("--csv EMPTY", "csv", "no column cat, label, review"),
    ("--csv FEW", "csv", "19 reviews"),
    ("--csv ONE", "csv", "both labels"),
    ("--resume MISSING", "resume", "No such file"),
    ("--resume TRUNCATED", "resume", "can't be loaded"),
    ("--resume FOREIGN", "resume", "not a checkpoint"),
    ("--resume SISTER", "resume", "not a checkpoint"),
    ("--resume OLDER", "resume", "another version"),
    ("--resume FOLDER", "resume", "can't be loaded"),
    ("--resume SFT --seed 1", "seed", "42"),
    ("--resume SFT --stage sft", "stage", "all"),
    ("--resume SFT --sft_rate 0.1", "sft_rate", "the checkpoint has"),
    ("--resume SFT --infer SFT", "infer", "not with"),
    ("--infer RM", "infer", "writes nothing"),
    ("--infer MISSING", "infer", "No such file"),
    ("--infer PPO --beta 7", "beta", "the checkpoint has"),
]


@pytest.fixture(scope="session")
def files(run, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    found = {s.upper(): run / s / "checkpoint-last.pt" for s in ("sft", "rm", "ppo")}
    found |= bad_files(tg, found["SFT"], folder, missing="dpo_alpha")
    found |= {name: folder / name.lower() for name in ("NOWHERE", "COLUMNS", "EMPTY", "FEW", "ONE")}
    write(found["COLUMNS"], "cat,review\n甲,好\n")
    write(found["EMPTY"], "")
    write(found["FEW"], "cat,label,review\n" + "".join(f"甲,{k % 2},好\n" for k in range(19)))
    write(found["ONE"], "cat,label,review\n" + "甲,1,好\n" * 30)
    return found


@pytest.mark.parametrize("line,flag,text", BAD, ids=[line for line, *_ in BAD])
def test_bad_input(line, flag, text, tmp_path, capsys, files, run):
    flags = [str(files.get(word, word)) for word in line.split()]
    if not {"--resume", "--infer"} & {*flags}:
        flags = [*short(tmp_path / "out", "a"), *flags]
    error = check_refused(tg, flags, tmp_path, capsys, [run])
    assert error.startswith(f"argument --{flag}") and text in error


def test_output_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    check_unwritable(tg, short(tmp_path / "file", "a", "--stage", "sft"), capsys)


@pytest.mark.parametrize("stage", UPDATES, ids=" ".join)
def test_nothing_is_created_on_the_wrong_device(stage):
    """Tensors made without a device would land on the default one, here the shapeless `meta`."""
    trainer = make_trainer(*stage, "--device", "cpu")
    tg.UPDATES[trainer.stage](trainer)  # AdamW makes its state at the first step
    trainer.reference = trainer.reference and trainer.reference.double()
    with torch.device("meta"):
        row = tg.UPDATES[trainer.stage](trainer)
        row |= tg.evaluate(trainer)
        if trainer.stage == "dpo":
            trainer.look_at_sft()
    assert all(math.isfinite(value) for value in row.values())


@pytest.mark.cuda
def test_cuda(tmp_path):
    assert tg.main(short(tmp_path, "a", "--device", "cuda")) == 0
    folder = tmp_path / tg.SCRIPT / "a"
    for stage, steps in STEPS.items():
        assert state(folder / stage)["counters"] == steps
        assert all(math.isfinite(v) for row in metrics(folder / stage) for v in row.values())
    path = folder / "grpo" / "checkpoint-000002.pt"
    assert tg.main(["--resume", str(path), "--device", "cpu", "--quiet"]) == 0
    assert tg.main(["--infer", str(path), "--device", "cuda", "--quiet"]) == 0
