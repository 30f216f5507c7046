# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.0", "numpy>=1.26",
#     "tensorboard>=2.20", "tqdm>=4.66",
# ]
# ///
"""RLHF on a tiny GPT: SFT, a reward model, then PPO, GRPO and DPO, with the truth known.

Article: 07_Reinforcement_Learning (RLHF; RLHF Instruct Gpt)
Run:     python tiny_gpt_rlhf.py                  (all stages, 2 minutes)
         ends with a table SFT / PPO / GRPO / DPO: reward model's score, share truly positive, KL
         python tiny_gpt_rlhf.py --stage sft, then --stage rm --sft_checkpoint PATH, ...
Watch:   tensorboard --logdir runs

The GPT writes short Chinese shopping reviews, character by character. A reward model learns from
labelled reviews which are positive; PPO or GRPO then push the GPT to what it likes, DPO to the
positive one of two labelled reviews (--dpo_pairs policy: to what the reward model likes). Default
reviews come from a grammar written here, so whether a text is a review, and positive, is known
(judge()), and a policy that fools the reward model can be told from one that writes good reviews.

Keeps:   three stages; R_t = -beta * log(pi / pi_ref) on each token, the score on the last; GAE,
         clip, whitening; GRPO with a KL in the loss; DPO.
Changes: the stop token has a label of its own and is trained (erratum 15); the reward model can be
         trained by ranking pairs (--rm_loss bradley_terry); a small GPT instead of a download.
         GRPO: no division by the std, and k2, whose gradient is the KL's (the usual form collapses
         here: --grpo_kl k3 --scale_rewards group). DPO: alpha * NLL of the chosen text keeps it
         likely.

symbol   | variable   | shape      | meaning
N, T     | ids        | (N, T)     | texts: <bos> category ： review <eos> <pad> ...
a_t      |            | (N, T - 1) | ids[:, 1:]: the character chosen after ids[:, :t + 1]
         | mask       | (N, T - 1) | the policy chose it: after the prompt, <eos> included
logp     | logp       | (N, T - 1) | log pi(a_t | s_t); logp_ref: of the reference, the SFT model
V        | values     | (N, T - 1) | the critic's V(s_t)
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

# ======== 1  The maths: pure functions on tensors =================================================


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Generalised advantage estimates, all (N, T) (Schulman et al. 2016, eq. 16).

    next_values[t] is V of the observation that step t led to, before any reset. Termination cuts
    the bootstrap, truncation (the time limit) does not; both cut the recursion.
    """
    assert rewards.shape == values.shape == next_values.shape
    # delta_t = r_t + gamma * V(s_{t+1}) * (1 - terminated_t) - V(s_t)
    delta = rewards + gamma * next_values * ~terminated - values
    # A_t = delta_t + gamma * lam * (1 - done_t) * A_{t+1}
    decay = gamma * lam * (~(terminated | truncated)).to(delta.dtype)
    advantages = torch.zeros_like(delta)
    following = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        following = delta[:, t] + decay[:, t] * following
        advantages[:, t] = following
    return advantages


def compute_grpo(scores: Tensor, scale_rewards: str = "group") -> Tensor:
    """Group-relative advantages (B, G) of scores (B, G) (DeepSeekMath 4.1.2; 群体标准化).

    scale_rewards: divide by the std of the "group" or of the whole "batch", or not ("none", Dr.
    GRPO). The std is unbiased (ddof 1) plus 1e-4, as in TRL. A flat group gets exactly 0.
    """
    # A_i = (R_i - mean(R)) / (std(R) + eps)
    advantages = scores - scores.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (scores.std(dim=1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    return advantages.masked_fill(flat_groups(scores)[:, None], 0.0)


def flat_groups(scores: Tensor) -> Tensor:
    """(B,) bool: all scores equal. No signal; dividing by their std would amplify rounding."""
    return scores.amax(dim=1) == scores.amin(dim=1)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / std, or x / std, over all unmasked entries of the batch (ddof 1); masked: 0.

    Over the batch: whitening each episode erases which one was better (erratum 3).
    """
    kept = x[mask]
    std = kept.std(correction=min(1, kept.numel() - 1))
    std = std.masked_fill(kept.amax() == kept.amin(), 1.0)  # all equal: 0, not rounding
    # NOT IN ARTICLE (nor TRL, which adds the mean back: that turns every 0 into a penalty)
    return (x - kept.mean() if shift_mean else x) / (std + 1e-8) * mask


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's objective per step, to be maximised (Schulman et al. 2017, eq. 7; high: DAPO)."""
    assert ratio.shape == advantages.shape
    # min(rho * A, clip(rho, 1 - low, 1 + high) * A)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def kl_k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimates KL(pi || pi_ref) at actions sampled from pi; never negative (Schulman 2020)."""
    # k3 = pi_ref / pi - log(pi_ref / pi) - 1
    log_ratio = logp_ref - logp
    return log_ratio.exp() - log_ratio - 1


def kl_k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """For a loss: at actions from pi its gradient is that of each state's KL(pi || pi_ref).

    k3 is the better estimate, but its gradient is that of KL(pi_ref || pi): its slope in log pi is
    at most 1, too weak where pi writes what the reference never would (the oracle measures both).
    """
    # k2 = 1/2 * log(pi / pi_ref)^2
    return 0.5 * (logp - logp_ref).square()


def aggregate(per_step: Tensor, mask: Tensor, loss_type: str, max_length: int) -> Tensor:
    """One number from terms (E, T), by TRL's names.

    bnpo: mean over all steps, so a long episode weighs more (the article's code). grpo: mean over
    each episode's steps, then over episodes (the paper's 1/|o_i|). dr_grpo: sum / (E * max_length).
    """
    per_step = per_step.masked_fill(~mask, 0.0)
    if loss_type == "bnpo":
        return per_step.sum() / mask.sum()
    if loss_type == "grpo":
        return (per_step.sum(dim=1) / mask.sum(dim=1)).mean()
    return per_step.sum() / (mask.shape[0] * max_length)


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension."""
    # H = -sum_a pi(a) * log pi(a)
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def token_rewards(
    logp: Tensor, logp_ref: Tensor, scores: Tensor, mask: Tensor, beta: float
) -> Tensor:
    """(N, T) InstructGPT's reward of every token; scores (N,) of the reward model on the last."""
    # R_t = -beta * log(pi(a_t|s_t) / pi_ref(a_t|s_t)), + RM(text) at the last t
    rewards = -beta * (logp - logp_ref) * mask
    return rewards + F.one_hot(last_index(mask), mask.shape[1]) * scores[:, None]


def last_index(mask: Tensor) -> Tensor:
    """(N,) the last True of each row of mask (N, T)."""
    return (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Reward model on pairs (InstructGPT, eq. 1): scores (N,) of the better and the worse text."""
    # L = -E[log sigma(r_w - r_l)]
    return -F.logsigmoid(chosen - rejected).mean()


def dpo_loss(policy_gap: Tensor, reference_gap: Tensor, beta: float) -> Tensor:
    """DPO (Rafailov et al. 2023, eq. 7) per pair, of log pi(chosen) - log pi(rejected) (N,)."""
    # L = -log sigma(beta * ((log pi_w - log pi_l) - (log ref_w - log ref_l)))
    return -F.logsigmoid(beta * (policy_gap - reference_gap))


# ======== 2  Data: reviews from a grammar whose truth is known, or a CSV file =====================

ASPECTS = {  # category: aspect: (good words, bad words)
    "酒店": {
        "房间": ("干净 宽敞 安静", "脏 狭小 吵"), "服务": ("热情 周到", "冷淡 差"),
        "早餐": ("丰富 可口", "单调 难吃"), "位置": ("方便 好找", "偏僻 难找"),
    },
    "书籍": {
        "内容": ("精彩 充实", "空洞 乏味"), "纸张": ("厚实 光滑", "粗糙 单薄"),
        "印刷": ("清晰 精美", "模糊 粗劣"), "文笔": ("流畅 生动", "生硬 啰嗦"),
    },
    "手机": {
        "屏幕": ("清晰 细腻", "模糊 偏暗"), "电池": ("耐用 持久", "掉电快 容易发烫"),
        "外观": ("漂亮 大气", "难看 笨重"), "信号": ("稳定 强", "弱 断断续续"),
    },
    "水果": {
        "味道": ("香甜 可口", "酸涩 寡淡"), "个头": ("饱满 均匀", "偏小 干瘪"),
        "包装": ("完好 用心", "破损 简陋"), "物流": ("快 及时", "慢 拖沓"),
    },
    "衣服": {
        "面料": ("柔软 舒服", "粗糙 扎人"), "做工": ("精细 扎实", "粗劣 马虎"),
        "款式": ("好看 大方", "老气 难看"), "尺码": ("合适 标准", "偏小 混乱"),
    },
}  # fmt: skip
DEGREES = ("很", "非常", "特别", "有点", "真的", "")
NEGATIONS = ("不", "一点也不", "没那么")
VERDICTS = {
    1: ("推荐购买", "会再来", "很满意", "没有失望", "物有所值"),
    -1: ("不推荐", "不会再来", "很失望", "没有惊喜", "后悔了"),
}
TURNS = ("但是", "不过")  # what comes after one of these counts


def known_clauses() -> dict[str, int]:
    """Every clause of the grammar, and its sign."""
    found = {verdict: sign for sign, verdicts in VERDICTS.items() for verdict in verdicts}
    for aspects in ASPECTS.values():
        for aspect, words in aspects.items():
            for sign, good_or_bad in zip((1, -1), words, strict=True):
                for word in good_or_bad.split():
                    found |= {aspect + degree + word: sign for degree in DEGREES}
                    found |= {aspect + negation + word: -sign for negation in NEGATIONS}
    return found


CLAUSES = known_clauses()


def judge(text: str) -> int:
    """The truth: 1 a positive review, -1 a negative one, 0 none of the grammar.

    The prompt's category does not matter. One to four different clauses and a full stop. After
    但是 or 不过 only what follows counts. The majority decides; where it is even, the last clause.
    """
    parts = text[:-1].split("，")
    clauses = [part[2:] if part.startswith((*TURNS, "虽然")) else part for part in parts]
    if text[-1:] != "。" or len(parts) > 4 or len(set(clauses)) < len(clauses):
        return 0
    signs: list[int] = []
    for part, clause in zip(parts, clauses, strict=True):
        sign = CLAUSES.get(clause, 0)
        if not sign:
            return 0
        signs = [sign] if part.startswith(TURNS) else [*signs, sign]
    total = sum(signs)
    return (total > 0) - (total < 0) or signs[-1]


@dataclass
class Review:
    """One row of the data."""

    category: str
    positive: bool
    text: str


def write_review(rng: random.Random) -> Review:
    """A review of the grammar: mostly of one sign, sometimes with a turn, a negation, a verdict."""
    category, main = rng.choice(list(ASPECTS)), rng.choice((1, -1))
    aspects = rng.sample(list(ASPECTS[category]), 3)

    def clause(aspect: str, sign: int) -> str:
        sign = sign if rng.random() < 0.85 else -sign
        good, bad = ASPECTS[category][aspect]
        if rng.random() < 0.3:
            return aspect + rng.choice(NEGATIONS) + rng.choice((bad if sign > 0 else good).split())
        return aspect + rng.choice(DEGREES) + rng.choice((good if sign > 0 else bad).split())

    kind = rng.random()
    if kind < 0.45:
        first, second = clause(aspects[0], -main), clause(aspects[1], main)
        parts = [f"虽然{first}", f"但是{second}"] if kind < 0.3 else [first, f"不过{second}"]
    else:
        parts = [clause(aspect, main) for aspect in aspects[: rng.choice((1, 2, 2, 3))]]
    if rng.random() < 0.4:
        parts.append(rng.choice(VERDICTS[main]))
    text = "，".join(parts) + "。"
    return Review(category, judge(text) > 0, text)


def load_csv(path: str, context: int) -> tuple[list[Review], Counter]:
    """Reviews of a file with columns cat, label, review, and how many rows were skipped, and why.

    utf-8 with or without a byte order mark, or gb18030. ValueError: no such columns, no such file.
    """
    raw = Path(path).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("gb18030", errors="replace")
    rows = csv.DictReader(io.StringIO(text, newline=""))
    names = {(name or "").strip().lower(): name for name in rows.fieldnames or []}
    if missing := {"cat", "label", "review"} - names.keys():
        raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
    found, skipped = [], Counter[str]()
    for row in rows:
        category, label, review = (
            (row[names[name]] or "").strip() for name in ("cat", "label", "review")
        )
        category = category.replace("：", ":")  # ： ends the prompt
        if not review or not category:
            skipped["empty"] += 1
        elif label not in ("0", "1"):
            skipped["unlabelled"] += 1
        elif len(category) + len(review) + 3 > context:
            skipped["too long"] += 1
        else:
            found.append(Review(category, label == "1", review))
    return found, skipped


PAD, BOS, EOS, UNK = range(4)


class Vocabulary:
    """Characters and their indices; 0 to 3 are <pad>, <bos>, <eos>, <unk>."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.index = {c: i for i, c in enumerate(characters, start=4)}

    def __len__(self) -> int:
        return 4 + len(self.characters)

    def prompt(self, category: str) -> list[int]:
        """<bos> category ："""
        return [BOS, *(self.index.get(c, UNK) for c in category + "：")]

    def encode(self, review: Review) -> list[int]:
        """<bos> category ： review <eos>"""
        return [*self.prompt(review.category), *(self.index.get(c, UNK) for c in review.text), EOS]

    def decode(self, ids: list[int]) -> str:
        """The characters up to <eos>; � for <unk>."""
        ids = ids[: ids.index(EOS)] if EOS in ids else ids
        return "".join(self.characters[i - 4] if i > 3 else "�" for i in ids if i not in (PAD, BOS))


def pack(rows: list[list[int]], device: torch.device) -> Tensor:
    """(N, T) long, padded at the end."""
    length = max(map(len, rows))
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows], device=device)


# ======== 3  Networks: a decoder-only transformer =================================================

Cache = list[tuple[Tensor, Tensor]]  # of each block: keys and values (N, heads, T, width / heads)


class Block(nn.Module):
    """Pre-norm causal attention and a four times wider MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple:
        split = self.qkv(self.norm_1(x)).chunk(3, dim=-1)  # 3 x (N, T, width)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in split)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        # with a cache, one character at a time may look at everything before it
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))  # (N, heads, T, w) -> (N, T, width)
        return x + self.down(F.gelu(self.up(self.norm_2(x)))), (k, v)


class GPT(nn.Module):
    """(N, T) ids -> (N, T, vocabulary) logits by tied embeddings; or (N, T) numbers by a head."""

    def __init__(self, args: argparse.Namespace, vocabulary: int, scalar: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, args.width)
        self.position = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        for weight in (p for p in self.parameters() if p.dim() > 1):
            nn.init.normal_(weight, std=0.02)
        self.head = nn.Linear(args.width, 1) if scalar else None  # reward model, critic

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """With a cache (a list, empty at first), ids are the next characters of all texts."""
        start = cache[0][0].shape[2] if cache else 0
        place = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.token(ids) + self.position(place)
        for k, block in enumerate(self.blocks):
            x, keys = block(x, cache[k] if cache and start else None)
            if cache is not None:
                cache[k : k + 1] = [keys]
        x = self.norm(x)
        return x @ self.token.weight.T if self.head is None else self.head(x).squeeze(-1)


def policy_dist(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi over the vocabulary, to sample and to score; <pad> and <bos> are never written."""
    # differs: characters
    never = torch.tensor([PAD, BOS], device=logits.device)
    return (logits / temperature).index_fill(-1, never, -math.inf).log_softmax(dim=-1)


def score_tokens(model: GPT, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(N, T - 1) log pi of ids[:, 1:], and (N, T - 1) entropies."""
    log_probs = policy_dist(model(ids[:, :-1]), temperature)  # (N, T - 1, vocabulary)
    entropy = categorical_entropy(log_probs.clamp(min=-1e4))  # 0 * -inf would be NaN
    logp = log_probs.gather(2, ids[:, 1:, None]).squeeze(2)  # -inf at <pad>, which nobody chose
    return logp.masked_fill(ids[:, 1:] == PAD, 0.0), entropy


# ======== 4  Rollout: the policy is frozen ========================================================


@dataclass
class Batch:
    """N texts; positions as in the table at the top."""

    ids: Tensor  # (N, T) long
    mask: Tensor  # (N, T - 1) bool: chosen by the policy
    stopped: Tensor  # (N,) bool: by <eos>, not by the end of the context
    logp_old: Tensor  # (N, T - 1) float


@torch.no_grad()
def sample_batch(
    model: GPT, prompts: list[list[int]], context: int, temperature: float, generator
) -> Batch:
    """A text for each prompt, until <eos> or the end of the context; a cached step a character."""
    # differs: texts
    device = model.token.weight.device
    given = pack(prompts, device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ids, cache = given[:, :1], []  # type: Tensor, Cache
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    masks, logps = [], []
    for t in range(1, context):
        log_probs = policy_dist(model(ids[:, -1:], cache)[:, -1], temperature)
        chosen = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
        free = t >= lengths  # the prompt is given, whatever its length
        if t < given.shape[1]:
            chosen = torch.where(free, chosen, given[:, t])
        chosen = torch.where(alive, chosen, PAD)
        masks.append(free & alive)
        logps.append(log_probs.gather(1, chosen[:, None]).squeeze(1))
        ids = torch.cat([ids, chosen[:, None]], dim=1)
        alive = alive & (chosen != EOS)
        if not alive.any():
            break
    mask = torch.stack(masks, dim=1)
    logp = torch.stack(logps, dim=1).masked_fill(~mask, 0.0)
    return Batch(ids, mask, ~alive, logp)


# ======== 5  Update: the policy moves =============================================================


def update_sft(trainer: Trainer) -> dict[str, float]:
    """Next character of a batch of reviews, <eos> included."""
    texts = trainer.by_length  # neighbours, from a random one on: hardly any padding
    first = trainer.draw(len(texts), 1)[0]
    rows = [texts[(first + k) % len(texts)] for k in range(trainer.args.sft_batch)]
    ids = pack(rows, trainer.device)
    logp, _ = score_tokens(trainer.actor, ids)
    # L = -mean log pi(a_t | s_t) over the batch's characters but <pad>
    # NOT IN ARTICLE: batches of about one length, so texts weigh the same, not characters
    loss = -logp[ids[:, 1:] != PAD].mean()
    return {"losses/policy_loss": loss.item(), "losses/grad_norm": trainer.descend(loss)}


def update_rm(trainer: Trainer) -> dict[str, float]:
    """Labels one by one, or the better above the worse of a pair of one category."""
    args, model = trainer.args, trainer.reward_model
    if args.rm_loss == "bce":
        rows = trainer.draw(len(trainer.train), args.rm_batch)
        ids = pack([trainer.train_ids[k] for k in rows], trainer.device)
        labels = torch.tensor([trainer.train[k].positive for k in rows], device=trainer.device)
        scores = read_scores(model, ids)
        loss = F.binary_cross_entropy_with_logits(scores, labels.float())
        right = (scores > 0) == labels
    else:
        pairs = trainer.draw_pairs(args.rm_batch // 2)
        scores = read_scores(model, pack([ids for pair in pairs for ids in pair], trainer.device))
        chosen, rejected = scores.view(-1, 2).unbind(dim=1)
        loss = bradley_terry_loss(chosen, rejected)
        right = chosen > rejected
    metrics = {"losses/policy_loss": loss.item(), "losses/accuracy": right.float().mean().item()}
    return metrics | {"losses/grad_norm": trainer.descend(loss)}


def prepare_inputs(trainer: Trainer, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (N,), advantages and returns (N, T - 1); for GRPO the returns are unused."""
    # differs: texts
    args = trainer.args
    scores = trainer.score(batch.ids)  # (N,)
    if trainer.stage == "grpo":
        advantages = compute_grpo(scores.view(-1, args.group_size), args.scale_rewards)
        advantages = advantages.view(-1, 1).expand_as(batch.logp_old)
        return scores, advantages, advantages
    with torch.no_grad():
        logp_ref, _ = score_tokens(trainer.reference, batch.ids, args.temperature)
        values = trainer.critic(batch.ids[:, :-1])  # (N, T - 1)
    rewards = token_rewards(batch.logp_old, logp_ref, scores, batch.mask, args.beta)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    ended = F.one_hot(last_index(batch.mask), values.shape[1]).bool()  # nothing comes after
    advantages = compute_gae(
        rewards, values, next_values, ended, torch.zeros_like(ended), args.gamma, args.lam
    )
    return scores, advantages, advantages + values


def update_rl(trainer: Trainer) -> dict[str, float]:
    """PPO or GRPO: texts, scores, advantages, and passes in minibatches."""
    args, ppo = trainer.args, trainer.stage == "ppo"
    chosen = [
        trainer.categories[k] for k in trainer.draw(len(trainer.categories), args.num_prompts)
    ]
    prompts = [trainer.vocabulary.prompt(c) for c in chosen for _ in range(args.group_size)]
    batch = sample_batch(trainer.actor, prompts, args.context, args.temperature, trainer.generator)
    scores, advantages, returns = prepare_inputs(trainer, batch)
    if ppo:
        advantages = whiten(advantages, batch.mask)
    check_finite(advantages=advantages)
    if not ppo:
        with torch.no_grad():
            logp_ref, _ = score_tokens(trainer.reference, batch.ids, args.temperature)
    rows: list[dict[str, float]] = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(scores), generator=trainer.generator, device=trainer.device)
        for part in order.split(args.minibatch_size):
            mask, old = batch.mask[part], batch.logp_old[part]
            logp, entropy = score_tokens(trainer.actor, batch.ids[part], args.temperature)
            ratio = (logp - old).masked_fill(~mask, 0.0).exp()  # mask before exp
            epsilon = args.clip_epsilon
            per_token = clipped_surrogate(ratio, advantages[part], epsilon, epsilon)
            if not ppo:  # J = E[min(rho A, clip(rho) A) - beta * KL]: PPO has it in the reward
                # not multiplied by the ratio: the KL's gradient in the first step, near it later
                penalty = kl_k2 if args.grpo_kl == "k2" else kl_k3
                kl = penalty(logp, logp_ref[part]).masked_fill(~mask, 0.0)
                per_token = per_token - args.grpo_beta * kl
            kind = "bnpo" if ppo else args.loss_type
            loss = -aggregate(per_token, mask, kind, args.context)
            metrics = {"losses/policy_loss": loss.item()}
            if ppo:
                values = trainer.critic(batch.ids[part][:, :-1])
                error = 0.5 * (values - returns[part])[mask].square().mean()
                metrics["losses/value_loss"] = error.item()
                loss = loss + error
            metrics["losses/grad_norm"] = trainer.descend(loss)
            with torch.no_grad():
                metrics |= {
                    "losses/entropy": entropy[mask].mean().item(),
                    "losses/approx_kl": kl_k3(old, logp)[mask].mean().item(),
                    "losses/clipfrac": ((ratio - 1).abs() > epsilon)[mask].float().mean().item(),
                }
            rows.append(metrics)
    groups = scores.view(-1, args.group_size)
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} | {
        "score/mean": scores.mean().item(),
        "score/max": scores.max().item(),
        "score/min": scores.min().item(),
        "group/reward_std": groups.std(dim=1).mean().item(),
        "group/zero_std_frac": flat_groups(groups).float().mean().item(),
        "charts/episodic_length": batch.mask.sum(dim=1).float().mean().item(),
    }


def update_dpo(trainer: Trainer) -> dict[str, float]:
    """A batch of pairs: the better text more likely, the worse one less, against the reference."""
    args = trainer.args
    if args.dpo_pairs == "data":
        pairs = trainer.draw_pairs(args.dpo_batch)
    else:
        pairs = [trainer.pairs[k] for k in trainer.draw(len(trainer.pairs), args.dpo_batch)]
    ids = pack([text for pair in pairs for text in pair], trainer.device)
    mask = chosen_mask(ids, trainer.vocabulary.index["："])
    gaps = []
    for model in (trainer.actor, trainer.reference):
        with torch.set_grad_enabled(model is trainer.actor):
            logp, _ = score_tokens(model, ids, args.temperature)
        gaps.append((logp * mask).sum(dim=1).view(-1, 2))  # (N, 2) log pi of both texts
    policy, reference = gaps
    loss = dpo_loss(policy[:, 0] - policy[:, 1], reference[:, 0] - reference[:, 1], args.dpo_beta)
    # DPO alone lowers both texts, the worse one more; alpha * NLL(chosen) holds the better one up
    nll = -policy[:, 0].sum() / mask[::2].sum()
    # r = beta * log(pi / pi_ref), the reward that DPO fits without a reward model
    implicit = args.dpo_beta * (policy - reference).detach()
    return {
        "losses/policy_loss": loss.mean().item(),
        "losses/grad_norm": trainer.descend(loss.mean() + args.dpo_alpha * nll),
        "dpo/margin": (implicit[:, 0] - implicit[:, 1]).mean().item(),
        "dpo/accuracy": (implicit[:, 0] > implicit[:, 1]).float().mean().item(),
        "dpo/reward_chosen": implicit[:, 0].mean().item(),
        "dpo/reward_rejected": implicit[:, 1].mean().item(),
    }


def read_scores(model: GPT, ids: Tensor) -> Tensor:
    """(N,) the number at <eos>, or at the last character where there is none."""
    last = last_index(ids != PAD)
    return model(ids).gather(1, last[:, None]).squeeze(1)


def chosen_mask(ids: Tensor, colon: int) -> Tensor:
    """(N, T - 1) what comes after the prompt's ：, <eos> included."""
    after = (ids == colon).cumsum(dim=1)[:, :-1] > 0
    return after & (ids[:, 1:] != PAD)


def check_finite(**tensors: Tensor) -> None:
    """FloatingPointError with the tensor's name where one is NaN or infinite."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise FloatingPointError(f"{name} is NaN or infinite")


UPDATES = {"sft": update_sft, "rm": update_rm, "ppo": update_rl, "grpo": update_rl}
UPDATES["dpo"] = update_dpo

# ======== 6  Evaluation: on prompts and reviews never trained on ==================================


@torch.no_grad()
def evaluate(trainer: Trainer) -> dict[str, float]:
    """What the policy writes, always with the same draws, and how it reads held-out reviews."""
    # differs: texts
    args, device = trainer.args, trainer.device
    if trainer.stage == "rm":
        return judge_scores(trainer)
    generator = torch.Generator(device).manual_seed(2**31)
    prompts = trainer.prompts(args.eval_texts)
    batch = sample_batch(trainer.actor, prompts, args.context, args.temperature, generator)
    texts = [trainer.vocabulary.decode(row) for row in batch.ids.tolist()]
    reviews = [text.partition("：")[2] for text in texts]
    held_out = pack(trainer.test_ids, device)
    logp, _ = score_tokens(trainer.actor, held_out)  # at temperature 1, whatever samples have
    pairs = [pair for text in reviews for pair in pairwise(text)]
    found = {
        "perplexity": (-logp[held_out[:, 1:] != PAD].mean()).exp().item(),
        "length": batch.mask.sum(dim=1).float().mean().item(),
        "stopped": batch.stopped.float().mean().item(),
        "distinct_2": len(set(pairs)) / max(1, len(pairs)),
        "different": len(set(texts)) / len(texts),
    }
    if not args.csv:
        truth = [judge(text) for text in reviews]
        found |= {"true_positive": truth.count(1) / len(truth)}
        found |= {"grammatical": 1 - truth.count(0) / len(truth)}
    if trainer.reward_model is not None:
        found["rm_score"] = trainer.score(batch.ids).mean().item()
    if trainer.reference is not None:
        logp, _ = score_tokens(trainer.actor, batch.ids, args.temperature)
        logp_ref, _ = score_tokens(trainer.reference, batch.ids, args.temperature)
        kl = kl_k3(logp, logp_ref).masked_fill(~batch.mask, 0.0)
        found["kl_token"] = (kl.sum() / batch.mask.sum()).item()
        found["kl_text"] = kl.sum(dim=1).mean().item()
    trainer.samples = texts
    return {f"eval/{name}": value for name, value in found.items()}


@torch.no_grad()
def judge_scores(trainer: Trainer) -> dict[str, float]:
    """Held-out labels that the sign of the score gives, and pairs that it ranks right."""
    scores = read_scores(trainer.reward_model, pack(trainer.test_ids, trainer.device))
    labels = torch.tensor([review.positive for review in trainer.test], device=trainer.device)
    found = {"eval/accuracy": ((scores > 0) == labels).float().mean().item()}
    if labels.any() and not labels.all():  # else there is no pair
        ranked = scores[labels][:, None] > scores[~labels][None, :]
        found["eval/pair_accuracy"] = ranked.float().mean().item()
    return found


# ======== 7  Trainer: state, checkpoints, run folder, loop ========================================

SCRIPT = "tiny_gpt_rlhf"
STAGES = ("sft", "rm", "ppo", "grpo", "dpo")


class Trainer:
    """One stage: its data, its models, and one update of them. Making a Trainer writes nothing."""

    def __init__(self, args: argparse.Namespace, stage: str, given: dict, data: Data) -> None:
        """given: "sft" and "rm", weights of stages before; "characters" of their vocabulary."""
        torch.set_num_threads(args.threads or torch.get_num_threads())
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.args, self.device = args, torch.device(auto if args.device == "auto" else args.device)
        self.stage, self.given, self.step, self.train_seconds = stage, given, 0, 0.0
        self.train, self.test = data
        self.vocabulary = Vocabulary(given["characters"])
        self.train_ids = [self.vocabulary.encode(review) for review in self.train]
        self.test_ids = [self.vocabulary.encode(review) for review in self.test]
        self.by_length = sorted(self.train_ids, key=len)
        self.categories = sorted({review.category for review in self.train})
        self.by_label: dict[tuple[str, bool], list[list[int]]] = {}  # texts, for pairs
        for review, ids in zip(self.train, self.train_ids, strict=True):
            self.by_label.setdefault((review.category, review.positive), []).append(ids)

        seed = args.seed + STAGES.index(stage)
        torch.manual_seed(seed)  # networks
        self.generator = torch.Generator(self.device).manual_seed(seed)  # batches and characters
        self.actor = self.make(given.get("sft"))
        self.reference: Any = self.make(given["sft"]) if "sft" in given else None
        self.reward_model: Any = None
        self.critic: Any = None
        if stage == "rm" or "rm" in given:
            self.reward_model = self.make(given.get("rm", given.get("sft")), scalar=True)
        self.parts: dict = {"reward_model" if stage == "rm" else "actor": self.trained()}
        if stage == "ppo":
            self.parts["critic"] = self.critic = self.make(given["rm"], scalar=True)
        groups = [{"params": list(part.parameters())} for part in self.parts.values()]
        fused = self.device.type != "mps"
        self.rate = getattr(args, f"{stage}_rate")
        self.steps = min(getattr(args, f"{stage}_steps"), args.max_steps or 10**9)
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.99), weight_decay=0.01, fused=fused
        )
        self.parts["optimizer"] = self.optimizer
        self.samples: list[str] = []  # of the last evaluation
        self.shift, self.spread = 0.0, 1.0  # of the scores of what the SFT model writes
        self.pairs: list[tuple[list[int], list[int]]] = []
        if "rm" in given:
            self.look_at_sft()

    def make(self, weights: dict | None, scalar: bool = False) -> GPT:
        """A GPT, from these weights where there are any (a scalar head may be missing in them)."""
        model = GPT(self.args, len(self.vocabulary), scalar)
        if weights is not None:
            model.load_state_dict(weights, strict=not scalar)
        return model.to(self.device)

    def trained(self) -> GPT:
        """What this stage trains."""
        return self.reward_model if self.stage == "rm" else self.actor

    @torch.no_grad()
    def look_at_sft(self) -> None:
        """Scores of SFT texts, to make the reward mean 0, std 1; pairs, for --dpo_pairs policy."""
        args, pairs = self.args, self.stage == "dpo" and self.args.dpo_pairs == "policy"
        wanted, each = (args.dpo_texts, args.dpo_candidates) if pairs else (512, 8)
        generator = torch.Generator(self.device).manual_seed(args.seed)
        prompts = [p for p in self.prompts(-(-wanted // each)) for _ in range(each)]
        texts, scores = [], []
        for first in range(0, len(prompts), 128 * each):  # some at a time: the cache is large
            part = prompts[first : first + 128 * each]
            batch = sample_batch(self.reference, part, args.context, args.temperature, generator)
            texts += [[i for i in row if i != PAD] for row in batch.ids.tolist()]
            scores.append(read_scores(self.reward_model, batch.ids))
        score = torch.cat(scores)
        self.shift, self.spread = score.mean().item(), score.std().item()
        if not pairs:
            return
        groups = score.view(-1, each)
        best, worst = groups.argmax(dim=1).tolist(), groups.argmin(dim=1).tolist()
        for k, (high, low) in enumerate(zip(best, worst, strict=True)):
            self.pairs.append((texts[each * k + high], texts[each * k + low]))

    @torch.no_grad()
    def score(self, ids: Tensor) -> Tensor:
        """(N,) scores of texts, in standard deviations from what the SFT model writes."""
        return (read_scores(self.reward_model, ids) - self.shift) / self.spread

    def prompts(self, number: int) -> list[list[int]]:
        """The categories in turn."""
        count = len(self.categories)
        return [self.vocabulary.prompt(self.categories[k % count]) for k in range(number)]

    def draw(self, high: int, number: int) -> list[int]:
        """Random indices below high."""
        draws = torch.randint(high, (number,), generator=self.generator, device=self.device)
        return draws.tolist()

    def draw_pairs(self, number: int) -> list[tuple[list[int], list[int]]]:
        """A positive and a negative review each, of a category that has both."""
        by = self.by_label
        both = [c for c in self.categories if (c, True) in by and (c, False) in by]
        found = []
        for k in self.draw(len(both), number):
            good, bad = (by[both[k], label] for label in (True, False))
            found.append((good[self.draw(len(good), 1)[0]], bad[self.draw(len(bad), 1)[0]]))
        return found

    def descend(self, loss: Tensor) -> float:
        """A step of AdamW, each network clipped by its own norm. Returns the first one's norm."""
        done = self.step / self.steps
        for group in self.optimizer.param_groups:  # a short warm-up, then linearly to 0
            group["lr"] = self.rate * min(1.0, 0.05 + 20 * done) * (1 - done)
        self.optimizer.zero_grad()
        loss.backward()
        norms = [
            nn.utils.clip_grad_norm_(group["params"], self.args.max_grad_norm)
            for group in self.optimizer.param_groups
        ]
        check_finite(loss=loss, gradient=torch.stack(norms))
        self.optimizer.step()
        return norms[0].item()

    def save_model(self, path: Path) -> None:
        """Write a checkpoint by way of a temporary file: if that fails, the old one is whole."""
        checkpoint = {
            "script": SCRIPT,
            "config": vars(self.args),
            "stage": self.stage,
            "given": self.given,
            "data": self.fingerprint(),
            "counters": (self.step, self.train_seconds),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "generators": self.generator.get_state(),
        }
        torch.save(checkpoint, buffer := io.BytesIO())
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(buffer.getbuffer())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def fingerprint(self) -> int:
        """Of all reviews and labels: a resumed run must find the same."""
        return zlib.crc32(repr((self.train, self.test)).encode())

    def load_model(self, path: str) -> None:
        """Restore everything that save_model wrote. ValueError: the reviews are not the same."""
        checkpoint = load_checkpoint(path)
        if checkpoint["data"] != self.fingerprint():
            raise ValueError(f"{self.args.csv or 'the grammar'} has changed since {path}")
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint["parts"][name])
        self.step, self.train_seconds = checkpoint["counters"]
        if checkpoint["generators"].shape == self.generator.get_state().shape:  # else: other device
            self.generator.set_state(checkpoint["generators"])


Data = tuple[list[Review], list[Review]]


def load_data(args: argparse.Namespace) -> Data:
    """Reviews to train on and held-out ones: of the file, or of the grammar, by the seed."""
    rng = random.Random(args.seed)
    if args.csv:
        reviews, _ = load_csv(args.csv, args.context)
        rng.shuffle(reviews)
    else:
        reviews = [write_review(rng) for _ in range(args.reviews)]
        reviews = [x for x in reviews if len(x.category) + len(x.text) + 3 <= args.context]
    held_out = min(1000, len(reviews) // 10)
    return reviews[held_out:], reviews[:held_out]


def load_checkpoint(path: str) -> dict:
    """A checkpoint of this script. ArgumentTypeError says what is wrong with the file."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a missing, damaged or foreign file
        known = isinstance(error, OSError) and error.filename  # missing, no permission, a folder
        reason = error.strerror if known else "damaged or foreign"
        raise argparse.ArgumentTypeError(f"{path} can't be loaded: {reason}") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("script") != SCRIPT:
        raise argparse.ArgumentTypeError(f"{path} is not a checkpoint of {SCRIPT}.py")
    return checkpoint


def new_folder(parent: Path, name: str) -> Path:
    """Make parent/name, or name-2, name-3, ...: a run is never overwritten."""
    folder, k = parent / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            k += 1
            folder = parent / f"{name}-{k}"


def open_run(folder: Path, args: argparse.Namespace, step: int) -> tuple:
    """Write config.json; open TensorBoard and metrics.jsonl, less what was logged after step."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import, so only where it is used

    head = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    git = shutil.which("git") and subprocess.run(head, capture_output=True, text=True)
    config = vars(args) | {
        "git_commit": git.stdout.strip() if git and git.returncode == 0 else None,
        "torch": torch.__version__,
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    path = folder / "metrics.jsonl"
    old = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [row for row in old if row.endswith("}\n") and json.loads(row)["step"] <= step]
    path.write_text("".join(kept), encoding="utf-8")
    return SummaryWriter(str(folder), purge_step=step + 1), path.open("a", encoding="utf-8")


def run_stage(trainer: Trainer, folder: Path, stop: list[bool]) -> dict[str, float]:
    """All updates of a stage, logged to its own folder. Returns the last evaluation."""
    args, steps = trainer.args, trainer.steps
    writer, rows = open_run(folder, args, trainer.step)
    bar = tqdm(
        desc=f"{folder.parent.name}/{trainer.stage}", total=steps, disable=args.quiet or None
    )
    bar.update(trainer.step)
    result: dict[str, float] = {}
    try:
        while trainer.step < steps and not stop:
            start = time.perf_counter()
            with torch.autograd.set_detect_anomaly(args.detect_anomaly):
                metrics = UPDATES[trainer.stage](trainer)
            trainer.step += 1
            step = trainer.step
            trainer.train_seconds += time.perf_counter() - start
            metrics["charts/learning_rate"] = trainer.optimizer.param_groups[0]["lr"]
            metrics["charts/train_seconds"] = trainer.train_seconds
            if stop or step * args.evaluations // steps > (step - 1) * args.evaluations // steps:
                metrics |= (result := evaluate(trainer))
                if trainer.stage != "rm":
                    writer.add_text("samples", "  \n".join(trainer.samples[:10]), step)
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            rows.write(json.dumps({"step": step} | metrics) + "\n")
            rows.flush()
            bar.set_postfix({"loss": f"{metrics['losses/policy_loss']:.3f}"}, refresh=False)
            bar.update()
            if args.save_steps and step % args.save_steps == 0:
                trainer.save_model(folder / f"checkpoint-{step:06d}.pt")
                trainer.save_model(folder / "checkpoint-last.pt")
        trainer.save_model(folder / "checkpoint-last.pt")
        result = result or evaluate(trainer)  # nothing was left to do
        if trainer.step == steps:
            flags = {k: v for k, v in vars(args).items() if v is not None}
            scores = {name.replace("eval", "hparam"): value for name, value in result.items()}
            writer.add_hparams(flags, scores, run_name=".")
    except (FloatingPointError, OSError) as error:
        where = f"{trainer.stage}, update {trainer.step + 1}: "
        raise type(error)(f"{where}{error}; run: {folder}") from error
    finally:
        bar.close()
        rows.close()
        writer.close()
    return result


def train(args: argparse.Namespace) -> dict:
    """The stages that parse_args() says. Returns their last evaluations and the run folder."""
    # differs: stages
    began, data = time.perf_counter(), load_data(args)
    stages = list(STAGES) if args.stage == "all" else [args.stage]
    given = load_given(args, data)
    if args.resume:
        saved, folder = load_checkpoint(args.resume), Path(args.resume).parent.parent
        stages, given = stages[stages.index(saved["stage"]) :], saved["given"]
    else:
        folder = new_folder(Path(args.output_dir) / SCRIPT, args.run_name)
    stop: list[bool] = []

    def on_interrupt(*_: object) -> None:
        if not args.quiet:
            tqdm.write("finishing this update, then saving; Ctrl-C again stops at once")
        stop.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    main_thread = threading.current_thread() is threading.main_thread()  # else no signal comes
    previous = signal.signal(signal.SIGINT, on_interrupt) if main_thread else None
    results, resumed, last = {}, args.resume, folder
    try:
        for stage in stages:
            trainer = Trainer(args, stage, given, data)
            if resumed:
                trainer.load_model(resumed)
            resumed, last = None, folder / stage
            last.mkdir(exist_ok=True)
            results[stage] = run_stage(trainer, last, stop)
            if stage in ("sft", "rm"):
                weights = {k: v.clone() for k, v in trainer.trained().state_dict().items()}
                given = given | {stage: weights}
            if stage == "rm":  # what the policies are compared with
                results["sft"] = evaluate(Trainer(args, "grpo", given, data))
            if stop:
                break
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, previous)
    return {
        "stages": {s: {k[5:]: v for k, v in row.items()} for s, row in results.items()},
        "seconds": time.perf_counter() - began,
        "run_dir": str(folder),
        "last": str(last / "checkpoint-last.pt"),
        "stopped": bool(stop) and (stage != stages[-1] or trainer.step < trainer.steps),
    }


def load_given(args: argparse.Namespace, data: Data) -> dict:
    """Weights of the stages before, and the vocabulary: of their checkpoints, or of the data."""
    given: dict = {}
    for stage, path in (("sft", args.sft_checkpoint), ("rm", args.rm_checkpoint)):
        if path:
            saved = load_checkpoint(path)
            given |= {"characters": saved["given"]["characters"]}
            given[stage] = saved["parts"]["actor" if stage == "sft" else "reward_model"]
    if "characters" not in given:
        text = "".join(review.category + "：" + review.text for review in data[0])
        given["characters"] = "".join(sorted(set(text)))
    return given


def infer(args: argparse.Namespace) -> None:
    """Reviews by a checkpoint's policy, and the truth about them."""
    # differs: writes reviews
    saved = load_checkpoint(args.infer)
    characters = {"characters": saved["given"]["characters"]}
    trainer = Trainer(args, "sft", characters, load_data(args))
    trainer.actor.load_state_dict(saved["parts"]["actor"])
    generator = torch.Generator(trainer.device).manual_seed(args.seed)
    batch = sample_batch(
        trainer.actor, trainer.prompts(10), args.context, args.temperature, generator
    )
    words = {1: "positive", -1: "negative", 0: "no review"}
    for row in batch.ids.tolist():
        text = trainer.vocabulary.decode(row)
        print(text, "" if args.csv else f" ({words[judge(text.partition('：')[2])]})")


# ======== 8  Command line =========================================================================


def number(kind: type, low: float, high: float = math.inf):
    """An argparse type: a number of this kind in low..high."""

    def parse(text: str) -> float:
        if not low <= (value := kind(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low}..{high}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number at all
    return parse


def device_name(text: str) -> str:
    """An argparse type: auto, or a device that works here."""
    try:
        device = "cpu" if text == "auto" else text
        torch.rand(1, generator=torch.Generator(device), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split(". ")[0].split(", ")[0]
        raise argparse.ArgumentTypeError(f"can't use {text} here: {reason}") from error
    return text


def checkpoint_path(text: str) -> str:
    """An argparse type: a readable checkpoint of this script."""
    return text if load_checkpoint(text) else ""


def build_parser() -> argparse.ArgumentParser:
    about, formatter = (__doc__ or "").splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    usage = "%(prog)s [--flag value ...]; --help lists all flags"
    parser = argparse.ArgumentParser(usage=usage, description=about, formatter_class=formatter)
    # differs: flags of a GPT
    natural, positive, real = number(int, 0), number(int, 1), number(float, 0)
    unit = number(float, 0, 1)
    switch: dict = {"action": argparse.BooleanOptionalAction, "default": False}

    # fmt: off
    flag = parser.add_argument_group("run").add_argument
    flag("--stage", choices=[*STAGES, "all"], default="all", help="what to train; rm needs an SFT "
         "checkpoint, ppo, grpo and dpo also a reward model's")
    flag("--sft_checkpoint", type=checkpoint_path, metavar="PATH", help="of --stage sft")
    flag("--rm_checkpoint", type=checkpoint_path, metavar="PATH", help="of --stage rm")
    flag("--seed", type=number(int, 0, 2**31 - 1), default=42, help="of reviews, networks, draws")
    flag("--device", type=device_name, default="auto", help="auto (CUDA if here), cpu, cuda:N, mps")
    flag("--threads", type=natural, default=1, help="CPU threads; 0: torch decides")
    flag("--run_name", "--version", help="name of the run; None: stage and seed")
    flag("--output_dir", default="runs", help=f"a run goes to OUTPUT_DIR/{SCRIPT}/RUN_NAME/STAGE")
    flag("--max_steps", type=natural, default=0, help="most updates of a stage; 0: no limit")
    flag("--save_steps", type=natural, default=0, help="updates per checkpoint; 0: only the last")
    flag("--evaluations", type=positive, default=4, help="of each stage")
    flag("--eval_texts", type=positive, default=500, help="texts written for an evaluation")
    flag("--resume", type=checkpoint_path, metavar="PATH", help="go on from a checkpoint, exactly")
    flag("--infer", type=checkpoint_path, metavar="PATH", help="let a checkpoint's policy write")
    flag("--detect_anomaly", **switch, help="torch's search for the origin of a NaN (slow)")
    flag("--quiet", **switch, help="no progress bar, no summary")

    flag = parser.add_argument_group("data and model").add_argument
    flag("--csv", metavar="PATH", help="reviews in columns cat, label, review; None: the grammar's")
    flag("--reviews", type=number(int, 20), default=20_000, help="of the grammar, 2,000..50,000")
    flag("--context", type=number(int, 8), default=48,
         help="T, characters of the longest text, its prompt included, 41..128")
    flag("--width", type=positive, default=64, help="of embeddings and layers, 32..256")
    flag("--layers", type=positive, default=2, help="blocks of the GPT, 1..6")
    flag("--heads", type=positive, default=4, help="of attention, 1..8; divides --width")
    flag("--temperature", type=number(float, 1e-3), default=0.8,
         help="of sampling and scoring alike, 0.5..1")

    flag = parser.add_argument_group("SFT and reward model").add_argument
    flag("--sft_steps", type=positive, default=2400, help="updates, 500..5000")
    flag("--sft_batch", type=positive, default=32, help="reviews an update, 16..128")
    flag("--sft_rate", type=unit, default=5e-3, help="learning rate of AdamW, 1e-3..1e-2")
    flag("--rm_loss", choices=["bce", "bradley_terry"], default="bradley_terry",
         help="labels one by one, as in the notes; or better above worse, as InstructGPT")
    flag("--rm_steps", type=positive, default=900, help="updates, 200..2000")
    flag("--rm_batch", type=number(int, 2), default=64, help="reviews an update, 16..128")
    flag("--rm_rate", type=unit, default=2e-3, help="learning rate of AdamW, 5e-4..5e-3")

    flag = parser.add_argument_group("PPO and GRPO").add_argument
    for name, steps in (("ppo", 65), ("grpo", 75)):
        flag(f"--{name}_steps", type=positive, default=steps, help="updates, 20..200")
        flag(f"--{name}_rate", type=unit, default=5e-4, help="learning rate of AdamW, 1e-4..1e-3")
    flag("--num_prompts", type=positive, default=16, help="B, prompts an update, 8..64")
    flag("--group_size", type=number(int, 2), default=8, help="G, texts a prompt, 4..32")
    flag("--update_epochs", type=positive, default=2, help="passes over them, 1..4")
    flag("--minibatch_size", type=positive, default=64, help="texts a gradient step, 16..B * G")
    flag("--beta", type=real, default=0.1, help="of PPO's reward -beta log(pi / pi_ref), 0..0.3")
    flag("--grpo_beta", type=real, default=0.05, help="weight of the KL in GRPO's loss, 0..0.5")
    flag("--grpo_kl", choices=["k2", "k3"], default="k2",
         help="KL in GRPO's loss: k3 as in the papers; k2 has the gradient of KL(pi || pi_ref)")
    flag("--clip_epsilon", type=real, default=0.2,
         help="epsilon of the clip, 0.1..0.3; inf: no clip")
    flag("--gamma", type=unit, default=1.0, help="discount of PPO, 0.9..1")
    flag("--lam", type=unit, default=0.95, help="lambda of GAE: 0 TD, 1 Monte Carlo; PPO only")
    flag("--scale_rewards", choices=["group", "batch", "none"], default="none",
         help="std that divides GRPO's advantages, or none (Dr. GRPO); scores have std 1 at first")
    flag("--loss_type", choices=["bnpo", "grpo", "dr_grpo"], default="bnpo",
         help="GRPO's mean: over all characters; each text, then texts; sum / constant length")
    flag("--max_grad_norm", type=number(float, 1e-6), default=1.0,
         help="clips the gradient of each network, 0.1..1; inf: no clipping")

    flag = parser.add_argument_group("DPO").add_argument
    flag("--dpo_steps", type=positive, default=450, help="updates, 100..1000")
    flag("--dpo_rate", type=unit, default=1.5e-3, help="learning rate of AdamW, 3e-4..3e-3")
    flag("--dpo_batch", type=positive, default=32, help="pairs an update, 16..128")
    flag("--dpo_beta", type=real, default=0.3,
         help="beta: how near to stay to the reference, 0.1..1")
    flag("--dpo_pairs", choices=["data", "policy"], default="data",
         help="labelled reviews; or best and worst of some SFT texts by the reward model")
    flag("--dpo_candidates", type=number(int, 2), default=8,
         help="SFT texts to choose a pair of, 2..32; --dpo_pairs policy only")
    flag("--dpo_texts", type=number(int, 2), default=24_576,
         help="SFT texts in all; --dpo_pairs policy only")
    flag("--dpo_alpha", type=real, default=3.0,
         help="weight of the chosen text's negative log-likelihood (RPO); 0: DPO alone")
    # fmt: on
    return parser


# what the command line may change of a checkpoint's flags
FREE = {"resume", "infer", "device", "threads", "quiet"}
RESUME_FREE = FREE | {"save_steps", "detect_anomaly"}
INFER_FREE = FREE | {"seed", "temperature"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags, completed and checked: exit 2 with the flag's name where one can't work."""
    # differs: stages
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.resume and args.infer:
        parser.error("argument --infer: not with --resume")
    if args.resume or args.infer:
        flag, free = ("resume", RESUME_FREE) if args.resume else ("infer", INFER_FREE)
        saved = load_checkpoint(args.resume or args.infer)
        config = saved["config"] | {"resume": None, "infer": None}
        if vars(args).keys() != config.keys():
            parser.error(f"argument --{flag}: was written by another version of {SCRIPT}.py")
        args = parser.parse_args(argv, argparse.Namespace(**config))  # what is given, on top
        for name, value in config.items():
            if name not in free and getattr(args, name) != value:
                parser.error(f"argument --{name}: the checkpoint has {value}")
        if args.infer and saved["stage"] == "rm":
            parser.error("argument --infer: a reward model writes nothing")
    else:
        needs = {"rm": ["sft"], "ppo": ["sft", "rm"], "grpo": ["sft", "rm"], "dpo": ["sft", "rm"]}
        for stage in ("sft", "rm"):
            path = getattr(args, f"{stage}_checkpoint")
            if bool(path) != (stage in needs.get(args.stage, [])):
                what = "needed" if not path else "not used"
                parser.error(f"argument --{stage}_checkpoint: {what} for --stage {args.stage}")
            if not path:
                continue
            saved = load_checkpoint(path)
            if saved["stage"] != stage:
                parser.error(f"argument --{stage}_checkpoint: is of stage {saved['stage']}")
            for name in ("width", "layers", "heads", "context"):
                if getattr(args, name) != saved["config"][name]:
                    parser.error(f"argument --{name}: {path} has {saved['config'][name]}")
    if args.sft_checkpoint and args.rm_checkpoint:
        ours, theirs = (load_checkpoint(p) for p in (args.sft_checkpoint, args.rm_checkpoint))
        if ours["given"]["characters"] != theirs["given"]["characters"]:
            parser.error("argument --rm_checkpoint: has other characters than --sft_checkpoint")
    if args.width % args.heads:
        parser.error(f"argument --heads: {args.heads} does not divide --width {args.width}")
    if args.csv:
        try:
            reviews, skipped = load_csv(args.csv, args.context)
        except (OSError, ValueError, csv.Error) as error:
            parser.error(f"argument --csv: {error}")
        if not args.quiet:
            why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "none"
            print(f"{args.csv}: {len(reviews)} reviews; skipped: {why}")
        labels: dict[str, set[bool]] = {}
        for review in reviews:
            labels.setdefault(review.category, set()).add(review.positive)
        if len(reviews) < 20 or max(map(len, labels.values())) < 2:
            what = "20 at least, and a category with both labels"
            parser.error(f"argument --csv: {len(reviews)} reviews; give {what}")
    elif args.context < 41 and len(load_data(args)[0]) < 18:
        parser.error("argument --context: too few reviews of the grammar fit; they have up to 41")
    if args.run_name is None:
        args.run_name = f"{args.stage}-seed{args.seed}"
    if args.run_name in ("", "..") or Path(args.run_name).name != args.run_name:
        parser.error("argument --run_name: give the name of one folder, not a path")
    return args


def summary(result: dict, args: argparse.Namespace) -> str:
    """The last lines of a run: a row for each policy."""
    # differs: stages
    names = {
        "rm_score": "RM score", "true_positive": "truly positive", "grammatical": "grammatical",
        "kl_text": "KL / text", "kl_token": "KL / character", "perplexity": "perplexity",
        "length": "length", "stopped": "stopped", "distinct_2": "distinct-2",
        "accuracy": "RM accuracy", "pair_accuracy": "RM pair accuracy",
    }  # fmt: skip
    stages, lines = result["stages"], []
    policies = [stage for stage in stages if stage != "rm"]
    shown = [name for name in names if any(name in stages[stage] for stage in policies)]
    if policies:
        lines.append("      " + "  ".join(names[name] for name in shown))
    for stage in policies:
        cells = [
            f"{stages[stage][name]:.3f}".rjust(len(names[name])) if name in stages[stage] else ""
            for name in shown
        ]
        lines.append(f"{stage:6}" + "  ".join(cells))
    if "rm" in stages:
        found = stages["rm"]
        lines.append(
            f"reward model, held-out reviews: {found['accuracy']:.3f} of labels, "
            f"{found.get('pair_accuracy', math.nan):.3f} of pairs"
        )
    rates = [stages[s]["true_positive"] for s in policies if s != "sft" and not args.csv]
    if rates and not result["stopped"]:
        word = "solved" if min(rates) >= 0.9 else "not solved"
        lines.append(f"{word}: truly positive at least {min(rates):.1%} (threshold 90%)")
    run_dir = Path(result["run_dir"])
    lines.append(f"{result['seconds']:.0f} s in all")
    lines.append(f"logs: {run_dir}    watch: tensorboard --logdir {run_dir.parent.parent}")
    if result["stopped"]:
        lines.append(f"go on: python {SCRIPT}.py --resume {result['last']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    # differs: one run; prints Chinese, too
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Chinese
    args = parse_args(argv)
    try:
        if args.infer:
            infer(args)
            return 0
        result = train(args)
    except KeyboardInterrupt:
        print("stopped at once; checkpoints saved before are whole", file=sys.stderr)
        return 130
    except (ValueError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if not args.quiet:
        print(summary(result, args))
    return 130 if result["stopped"] else 0


if __name__ == "__main__":
    sys.exit(main())
