"""Operations that work on every entry by itself, with broadcasting."""

from tf_adadp.gradients.proof.rules.registry import rule
from tf_adadp.gradients.proof.values import Mixes, Rows, rows

_OPERATIONS = (
    "Abs", "Acos", "Acosh", "Add", "AddN", "AddV2", "Angle", "ApproximateEqual", "Asin",
    "Asinh", "Atan", "Atan2", "Atanh", "BesselI0e", "BesselI1e", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "Bucketize", "Cast", "Ceil", "ClipByValue", "Complex", "ComplexAbs", "Conj",
    "Cos", "Cosh", "Digamma", "Div", "DivNoNan", "Elu", "EluGrad", "EnsureShape", "Equal", "Erf",
    "Erfc", "Erfinv", "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod", "Greater",
    "GreaterEqual", "Identity", "Igamma", "Igammac", "Imag", "Inv", "Invert",
    "IsFinite", "IsInf", "IsNan", "LeakyRelu", "LeakyReluGrad", "LeftShift", "Less",
    "LessEqual", "Lgamma", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr",
    "LookupTableFindV2", "Maximum", "Minimum", "Mod", "Mul", "MulNoNan", "Ndtri", "Neg",
    "NextAfter", "NotEqual", "OnesLike", "Polygamma", "Pow", "PreventGradient", "Real",
    "RealDiv", "Reciprocal", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "RightShift", "Rint",
    "Round", "Rsqrt", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "Sign", "Sin", "Sinh",
    "Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "Sqrt", "Square",
    "SquaredDifference", "Sub", "StopGradient", "Tan", "Tanh", "TruncateDiv", "TruncateMod",
    "Xdivy", "Xlog1py", "Xlogy", "ZerosLike", "Zeta",
)  # fmt: skip


@rule(*_OPERATIONS)
def broadcast(op, values):
    """Keeps the axis, counted from the end: all operands must have their examples there.

    Public operands have no entries of their own along it.
    """
    present = [v for v in values if isinstance(v, Rows)]
    place = present[0].from_end
    if any((v.from_end, v.stride) != (place, present[0].stride) for v in present):
        raise Mixes("combines every example with every other one")
    for value in values:
        if isinstance(value, Rows):
            continue
        if value.secret:
            raise Mixes("uses one random draw for all examples")
        if value.sized:
            raise Mixes("uses the number of examples")
        if value.rank is None:
            raise Mixes("has an operand of unknown rank")
        if value.rank >= -place and value.dims[place] != 1:
            raise Mixes("has a constant with entries of its own for every place in the batch")
    rank = max(v.rank for v in values)
    dims = [_common([v.dims[i] for v in values if v.rank >= -i]) for i in range(-rank, 0)]
    return rows(op.outputs[0], rank + place, present[0].stride, tuple(dims))


@rule("InvGrad", "ReciprocalGrad", "RsqrtGrad", "SigmoidGrad", "SqrtGrad", "TanhGrad")
def paired(op, values):
    """Pairs entries by their place in memory: only the numbers of entries have to agree."""
    first, second = values
    same = all(isinstance(v, Rows) for v in values) and (
        first.axis == second.axis == 0 or (None not in first.dims and first.dims == second.dims)
    )
    if not same:
        raise Mixes("has operands of different shapes")
    return broadcast(op, values)


@rule("IdentityN")
def each(op, values):
    """Passes every operand on."""
    return list(values)


@rule("Select")
def select(op, values):
    """Chooses by entry, or by row where the condition is a vector."""
    condition, first, second = values
    if condition.rank == first.rank:
        return broadcast(op, values)
    if condition.rank != 1 or not all(isinstance(v, Rows) and v.axis == 0 for v in values):
        raise Mixes("chooses rows by a condition that is not theirs")
    if len({v.stride for v in values}) > 1:
        raise Mixes("chooses rows by a condition that is not theirs")
    return rows(op.outputs[0], 0, first.stride, first.dims)


@rule("BiasAdd", "BiasAddV1")
def bias_add(op, values):
    """Adds a public vector along the channels."""
    inputs, bias = values
    if not isinstance(inputs, Rows):
        raise Mixes("adds examples to a constant")
    if not hasattr(bias, "weights") or bias.secret or bias.sized:
        raise Mixes("adds a bias that depends on the examples")
    first = op.type == "BiasAdd" and op.get_attr("data_format") == b"NCHW"
    if inputs.axis == (1 if first else inputs.rank - 1):
        raise Mixes("has its channels along the axis of examples")
    return rows(op.outputs[0], inputs.axis, inputs.stride, inputs.dims)


def _common(dims):
    """Returns the entry of a broadcast shape."""
    known = [d for d in dims if d != 1]
    if not known:
        return 1
    return next((d for d in known if d is not None), None)
