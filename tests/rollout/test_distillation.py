"""Losses of on-policy distillation beside their definition, and what they are computed on."""

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.rollout import RolloutConfig, build_rollout
from deepspeed.runtime.rollout.base import RolloutBatch
from deepspeed.runtime.rollout.opsd import ResponseTokenBatch, generalized_jsd_loss


def _problem():
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 4, 9, requires_grad=True), torch.randn(2, 4, 9)
    return student, teacher, torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])


def _kl(p, q):
    return (p * (p.log() - q.log())).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [None, 3])
def test_divergence(beta, top_k):
    student, teacher, mask = _problem()
    found = generalized_jsd_loss(student, teacher, mask, beta=beta, temperature=2.0, teacher_top_k=top_k)
    keep = teacher.argsort(-1, descending=True)[..., : top_k or 9]
    s, t = ((logits.gather(-1, keep) / 2).softmax(-1) for logits in (student, teacher))
    m = (1 - beta) * s + beta * t
    whole = {0.0: _kl(t, s), 1.0: _kl(s, t)}.get(beta, beta * _kl(t, m) + (1 - beta) * _kl(s, m))
    torch.testing.assert_close(found.loss_sum, (whole * mask).sum())
    torch.testing.assert_close(found.loss, (whole * mask).sum() / 4)
    assert found.valid_token_count == 4
    gradients = torch.autograd.grad((whole * mask).sum() / 4, student, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(found.loss, student), gradients)


def test_clip_masked_tokens_and_bad_numbers():
    student, teacher, mask = _problem()
    s, t = student.softmax(-1), teacher.softmax(-1)
    clipped = (t * (t.log() - s.log())).clamp(max=0.05).sum(-1)
    found = generalized_jsd_loss(student, teacher, mask, beta=0.0, pointwise_clip=0.05)
    torch.testing.assert_close(found.loss_sum, (clipped * mask).sum())
    assert generalized_jsd_loss(student, teacher, torch.zeros_like(mask)).loss == 0
    teacher[..., 2] = -torch.inf  # a token that the teacher never gives
    assert generalized_jsd_loss(student, teacher, mask, beta=0.0).loss.isfinite()
    for wrong in ({"beta": 2}, {"temperature": 0}, {"teacher_top_k": 10}, {"response_mask": mask[:1]}):
        with pytest.raises(DeepSpeedConfigError, match="generalized_jsd_loss"):
            generalized_jsd_loss(
                **{"student_logits": student, "teacher_logits": teacher, "response_mask": mask, **wrong}
            )


def test_response_tokens():
    ids = torch.tensor([[0, 5, 6, 7, 2, 0], [4, 5, 8, 9, 3, 2]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    rollout = RolloutBatch(ids, mask, response_start_idx=3)
    assert (rollout.batch_size, rollout.seq_len) == (2, 6)
    batch = ResponseTokenBatch.from_rollout(rollout)
    assert batch.target_ids.tolist() == [[7, 2, 0], [9, 3, 2]] and batch.response_mask.tolist() == [
        [1, 1, 0],
        [1, 1, 1],
    ]
    logits = torch.arange(12.0).view(2, 6, 1)
    assert batch.select_causal_logits(logits).flatten().tolist() == [2, 3, 4, 8, 9, 10]


def test_unknown_engines_and_missing_students():
    with pytest.raises(DeepSpeedConfigError, match='expected "hybrid_engine"'):
        build_rollout(RolloutConfig(engine="vllm"), object(), object())
    with pytest.raises(DeepSpeedConfigError, match="found None"):
        build_rollout(RolloutConfig())
