"""Products of few rows: what a decode step at batch 1 spends its time on."""

import torch

from dsa_compile.lowering.row_products.launch import expert_products_cuda, row_products_cuda
from dsa_compile.lowering.row_products.reference import expert_products, row_products

torch.library.impl("dsa::row_products", "cpu")(row_products)
torch.library.impl("dsa::row_products", "cuda")(row_products_cuda)
torch.library.impl("dsa::expert_products", "cpu")(expert_products)
torch.library.impl("dsa::expert_products", "cuda")(expert_products_cuda)

__all__ = ["expert_products", "row_products"]
