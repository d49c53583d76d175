"""A tiny model for tests of `offroad bench engine`."""

CONFIG = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=500,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
