"""See what the passes do to each family before any weight is loaded."""

import dsa_compile
from dsa_compile.models.miniature import CLASSES, miniature

for family in CLASSES:
    model = miniature(family)
    has_indexer = hasattr(model.config, "index_topk")
    fields = {} if has_indexer else {"selector": "attention", "index_topk": 8}
    explanation = dsa_compile.explain(model, context=4096, **fields)
    print(explanation)
    print(f"{family}: {explanation.stock_bytes_per_token} -> {explanation.bytes_per_token} cache bytes per token\n")
