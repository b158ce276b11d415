"""The backend on an untouched model, by its name alone: nothing of this package is imported here."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

config = DeepseekV3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    head_dim=8,
    first_k_dense_replace=1,
)
torch.manual_seed(0)
model = DeepseekV3ForCausalLM(config).eval()
ids = torch.randint(3, 64, (2, 40))

dense = torch.compile(model, backend="dsa", options={"lowering": "eager"})
sparse = torch.compile(model, backend="dsa", options={"selector": "attention", "index_topk": 8, "lowering": "eager"})
with torch.no_grad():
    stock = model(ids, use_cache=False).logits
    print(f"dense over latents: {(dense(ids, use_cache=False).logits - stock).abs().max():.1e} from the stock model")
    print(f"sparse, 8 of 40 keys: {(sparse(ids, use_cache=False).logits - stock).abs().max():.1e} from the stock model")
