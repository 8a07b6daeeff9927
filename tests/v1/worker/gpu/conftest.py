"""vLLM 0.28, the last to align KV cache views, is older than the composite supports."""

from vllm.v1 import kv_cache_interface

HAS_COMPOSITE = hasattr(kv_cache_interface, "KVCacheLayout")
collect_ignore = [] if HAS_COMPOSITE else ["test_composite_under_attn_utils.py"]
