"""Per-example gradients known as products, with norms and sums that never form them.

A layer that multiplies its inputs by a matrix has, for one example with inputs a [T, i] and output
gradients d [T, o] (T = 1 for a dense layer on vectors; positions of a sequence or an image
otherwise), the gradient g = Σ_t a_t ⊗ d_t. Then

- T = 1: ‖g‖ = ‖a‖·‖d‖; in the metric of an ellipsoid Σ (g/b)² = rowsum((a² · b⁻²) ∘ d²);
- T > 1: ‖g‖² = Σ_ts (a_t·a_s)(d_t·d_s), the Gram form;

and Σ_x w_x·g_x is one matrix product with weighted rows. (Goodfellow 2015, "Efficient per-example
gradient computations"; Li et al. 2021, "Large language models can be strong differentially private
learners", for sequences. The forms for ellipsoids with centres are this library's.)

Every norm is an upper bound, see `row_gradients`. Rows are scaled so that no square underflows:
an example with tiny inputs and huge output gradients must not look small.
"""

from tf_adadp.gradients.forms.assemble import add, products
from tf_adadp.gradients.forms.factored import Factored
from tf_adadp.gradients.forms.layout import MatrixLayout
from tf_adadp.gradients.forms.lookups import Lookups
from tf_adadp.gradients.forms.outer import OuterProducts
from tf_adadp.gradients.forms.sequence import SequenceProducts, sequence_form

__all__ = [
    "Factored",
    "Lookups",
    "MatrixLayout",
    "OuterProducts",
    "SequenceProducts",
    "add",
    "products",
    "sequence_form",
]
