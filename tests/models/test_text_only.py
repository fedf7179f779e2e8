"""Qwen2ForCausalLM, which is the language model alone with plain rotary positions."""

from __future__ import annotations

import torch

from gllm.models.registry import model_info
from gllm.worker.runner import StageRunner
from tests.models.checkpoints import greedy, make_prompt
from tests.worker.harness import Harness


def test_qwen2_equals_transformers(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    reference = Qwen2ForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    prompt = make_prompt((23,))
    expected = greedy(reference, prompt, 5)
    assert model_info(tmp_path).image_token_id is None
    runner = StageRunner.build(tmp_path, num_blocks=16, page_size=4)
    (request,) = Harness([runner], 16).run([prompt], 5, 7)
    assert request.output == expected.tokens
