"""Which layers the ghost engine knows, and what a rule for a layer is.

A rule runs a layer's forward pass on a whole batch and says, for the tensor that the layer's
weights made, how its gradient gives the weights' per-example gradients:

    @register(keras.layers.Dense)
    def dense(layer, call, tap, inputs, **kwargs):
        def gradients(outputs):              # [B, ..., units]: gradients with respect to z
            yield layer.kernel, products(inputs, outputs, layout)
            yield layer.bias, Rows(sum over positions of outputs)

        activation = layer.activation
        with replaced(layer, activation=lambda z: activation(tap(z, gradients))):
            return call(inputs, **kwargs)    # the layer's own `call`

A rule that cannot follow a layer's configuration returns NotImplemented before it taps anything;
the layer then goes example by example.
"""

_RULES = {}


def register(*layer_classes):
    """Registers a rule for layer classes, and for subclasses that do not override `call`.

    The rule is a function `rule(layer, call, tap, *args, **kwargs)`:

    - `layer`: the layer; `call`: its own `call`, bound; the rest: what `call` was called with;
    - `tap(z, gradients)`: marks a tensor z [B, ...] as the one through which trainable weights of
      the layer reach the loss, and returns it. `gradients` maps dL/dz, float32 and of z's shape
      (row x is the gradient of example x's loss alone), to pairs (variable, `RowGradients`);
    - the return value is the layer's output, or NotImplemented.

    Rules run layers of your own on batches only if `declare_independent` says that they may; else
    such a layer is mapped over examples, rule or not.

    Every trainable weight must reach the loss through tapped tensors only; a tapped tensor must not
    mix examples. Both are checked on random data before a model is trained.
    """

    def decorate(rule):
        for layer_class in layer_classes:
            _RULES[layer_class] = rule
        return rule

    return decorate


def rule_for(layer):
    """The rule for a layer, or None."""
    for layer_class in type(layer).__mro__:
        if layer_class in _RULES:
            return _RULES[layer_class] if layer.call == layer_class.call.__get__(layer) else None
    return None
