"""JAX-Privacy: `clipped_grad` example by example, on microbatches, or on the whole lot at once.

Microbatches have 32 examples, or as many as a smaller divisor of the lot size allows.
"""

import jax
import jax.numpy as jnp
import jax_privacy
import measuring
import optax

MODES = {"microbatch_1": 1, "microbatch_32": 32, "whole": None}


def init(model, key):
    """Weights: a list of (kernel, bias)."""
    shapes = {
        "mlp": [(784, 1000), (1000, 10)],
        "cnn": [(8, 8, 1, 16), (4, 4, 16, 32), (512, 32), (32, 10)],
    }[model]
    initializer = jax.nn.initializers.glorot_uniform()
    keys = jax.random.split(key, len(shapes))
    return [(initializer(k, s), jnp.zeros(s[-1])) for k, s in zip(keys, shapes, strict=True)]


def mlp(weights, x):
    """Logits of the perceptron."""
    (w1, b1), (w2, b2) = weights
    return jax.nn.relu(x @ w1 + b1) @ w2 + b2


def cnn(weights, x):
    """Logits of the convolutional network."""
    (k1, b1), (k2, b2), (w3, b3), (w4, b4) = weights
    x = _pool(jnp.tanh(_convolve(x, k1, "SAME") + b1))
    x = _pool(jnp.tanh(_convolve(x, k2, "VALID") + b2))
    x = jnp.tanh(x.reshape(len(x), -1) @ w3 + b3)
    return x @ w4 + b4


def _convolve(x, kernel, padding):
    return jax.lax.conv_general_dilated(
        x, kernel, (2, 2), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")


def make_step(args):
    """The private step, compiled, and its first state."""
    apply = {"mlp": mlp, "cnn": cnn}[args.model]
    size = MODES[args.mode]
    if size is not None:
        size = max(s for s in range(1, size + 1) if args.lot_size % s == 0)

    def loss(weights, x, y):
        logits = apply(weights, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    gradient = jax_privacy.clipped_grad(
        loss,
        l2_clip_norm=measuring.L2_NORM_CLIP,
        normalize_by=args.lot_size,
        batch_argnums=(1, 2),
        return_values=True,
        microbatch_size=size,
    )
    noise = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=gradient.sensitivity() * measuring.NOISE_MULTIPLIER, prng_key=jax.random.key(1)
    )
    optimizer = optax.chain(noise, optax.sgd(measuring.LEARNING_RATE))

    @jax.jit
    def step(weights, state, x, y):
        gradients, aux = gradient(weights, x, y)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, aux.values.mean()

    weights = init(args.model, jax.random.key(0))
    return step, [weights, optimizer.init(weights)]


def main():
    args = measuring.parse_arguments(MODES)
    (jnp.ones([8, 8]) @ jnp.ones([8, 8])).sum().block_until_ready()

    def train(lots, steps):
        compiled, state = make_step(args)

        def step(x, y):
            *state[:], _ = jax.block_until_ready(compiled(*state, x, y))

        return measuring.run_steps(step, lots, steps)

    measuring.measure(args, train, ("jax", "jax-privacy"))


if __name__ == "__main__":
    main()
