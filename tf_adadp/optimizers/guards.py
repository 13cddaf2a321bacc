"""Guards private optimizers: refuses arguments and calls that would break the guarantee."""

import contextlib
import contextvars
import inspect
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tf_adadp import __version__
from tf_adadp.clipping import ClippedSums, L2Ball, QuantileClip
from tf_adadp.utils.checks import check_integer, check_number

# Methods that a class could override in 0.1: a charge that it adds there would be lost.
_NO_HOOKS = frozenset(("record", "expiring", "cover_metrics"))
_RELEASING = contextvars.ContextVar("tf_adadp_releasing", default=False)


class Guards:
    """Mixin of `DPOptimizer` that refuses releases without noise or charge.

    Raw gradients are refused outside `apply_private`, before any weight changes. Arguments that set
    the privacy are read-only. Stored state is that of the same optimizer, or refused as a whole.
    """

    _read_only: ClassVar[frozenset[str]] = frozenset()  # set for every subclass

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[: cls.__mro__.index(Guards)]:
            if not issubclass(base, Guards) and issubclass(base, keras.optimizers.Optimizer):
                raise TypeError(
                    f"class {cls.__name__}: {base.__name__} comes before DPOptimizer, and would "
                    f"take raw gradients. Write class {cls.__name__}(DPOptimizer, {base.__name__})."
                )
            for name in sorted(_NO_HOOKS.intersection(vars(base))):
                raise TypeError(
                    f"class {base.__name__} defines {name}, which nothing calls: charges are made "
                    "by optimizer.charges. For another price of a step override `event`."
                )
        cls._read_only = _read_only_names(cls)

    def __setattr__(self, name: str, value: Any):
        if name in self._read_only and hasattr(self, name):
            raise AttributeError(
                f"{name} of a {type(self).__name__} is read-only: graphs that release with "
                f"{getattr(self, name)!r} may be traced already. Make a new optimizer with "
                f"{name.removeprefix('_')}={value!r} and compile again."
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str):
        if name in self._read_only:
            raise AttributeError(
                f"{name} of a {type(self).__name__} is read-only: what it releases and is charged "
                "for follows from it. Make a new optimizer and compile again."
            )
        super().__delattr__(name)

    def apply(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Refuses raw gradients, which are not private. See `apply_private`."""
        _refuse_raw_gradients(self)
        return super().apply(grads, trainable_variables)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[tf.Tensor, keras.Variable]]
    ) -> tf.Variable:
        """Refuses raw gradients, which are not private. See `apply_private`."""
        _refuse_raw_gradients(self)
        return super().apply_gradients(grads_and_vars)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[tf.Tensor],
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Refuses raw gradients, which are not private. See `apply_private`."""
        _refuse_raw_gradients(self)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Applies Keras's update rule to one variable; refused outside `apply_private`."""
        _refuse_raw_gradients(self)
        return super().update_step(gradient, variable, learning_rate)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        _refuse_raw_gradients(self)
        super()._backend_update_step(grads, trainable_variables, learning_rate)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        """Adds nothing up: a release is the same on all replicas."""
        return grads_and_vars

    def _distributed_tf_update_step(self, distribution, grads_and_vars, learning_rate):
        # Keras may call it in a thread for all replicas, which the permission did not reach.
        with releasing():
            super()._distributed_tf_update_step(distribution, grads_and_vars, learning_rate)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Restores the public state. Noise and the examples' randomness go on under new keys.

        Raises:
            ValueError: the stored variables are not those of this optimizer. None is changed.
        """
        _check_stored(self, store)
        super().load_own_variables(store)
        self.renew_keys()

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict | None = None) -> "Guards":
        """Makes the optimizer that `get_config` described; missing arguments get defaults.

        Raises:
            ValueError: on a configuration that this version cannot honour, as a whole.
        """
        try:
            clip = config.get("l2_norm_clip")
            if isinstance(clip, dict) and "class_name" in clip:  # not a dict of bounds
                clip = keras.saving.deserialize_keras_object(clip)
                config = {**config, "l2_norm_clip": clip}
            parameters = inspect.signature(cls.__init__).parameters.values()
            if "noise_multiplier" not in config and any(
                p.kind is p.VAR_KEYWORD or p.name == "noise_multiplier" for p in parameters
            ):
                raise ValueError("noise_multiplier is missing, which no default can stand for.")
            return super().from_config(config, custom_objects)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"tf_adadp {__version__} can make no {cls.__name__} of this configuration: {error} "
                "It was written by another version, or edited; leaving a part of it out might "
                "change what is private. Load it with the version that saved it; or make the "
                "optimizer anew, and load the weights with their ledger by `load_weights`."
            ) from error

    def _require_noise_multiplier(self):
        """Raises a ValueError for an optimizer that was made without noise_multiplier."""
        if self.noise_multiplier is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} was made without noise_multiplier, which sets the privacy. Give compile a "
                "budget, target_epsilon=2.0, target_delta=1e-5, and fit finds it. In a custom loop "
                f"make {name}(noise_multiplier=σ), with σ = "
                "tf_adadp.accounting.calibrate_noise_multiplier(target_epsilon=2.0, delta=1e-5, "
                "sampling_probability=256 / 60000, steps=2000)."
            )

    def _refuse_quantile_clip(self, argument, reason):
        """Raises a ValueError for a clip norm that cannot be adapted."""
        raise ValueError(
            f"l2_norm_clip={self.l2_norm_clip!r} with {argument}: {reason}. Give a number."
        )

    def _check_variables(self, variables):
        """Refuses other variables than those that the optimizer was built for."""
        known = self._trainable_variables
        if len(known) != len(variables) or any(
            a is not b for a, b in zip(known, variables, strict=True)
        ):
            raise ValueError(
                f"This {type(self).__name__} was built for other variables (another model, or "
                "other trainable layers), and would go on moving those. Make a new optimizer."
            )

    @contextlib.contextmanager
    def _building(self):
        """Refuses a second attempt after a build that failed half way."""
        if self._build_failed:
            raise ValueError(
                f"An earlier build of this {type(self).__name__} failed, and left it half made. "
                "Make a new optimizer."
            )
        self._build_failed = True
        yield
        self._build_failed = False

    def _check_sums(self, sums, set_adapts):
        """Refuses sums that no noise can be fitted to.

        Args:
            sums: a clipped sum.
            set_adapts: whether the optimizer's clipping set depends on releases.
        """
        if set_adapts and getattr(sums, "clipping_set", None) is None:
            raise ValueError(
                f"sums without their clipping set: the clipping set of {type(self).__name__} "
                "changes with its releases, or releases more than the sums, so the noise for them "
                "is not known. Pass the result of clipped_sum unchanged (a copy, or the result of "
                "a tf.function, has lost its set); or call tf_adadp.private_step. For sums that "
                "you computed, pass tf_adadp.ClippedSums(sums, clipping_set), with the "
                "optimizer.clipping_set() to which they were clipped, by its "
                "sums_beside(gradients, mask, losses)."
            )
        self._check_statistics(sums)
        if isinstance(sums, ClippedSums) and not sums.intact:
            raise ValueError(
                "sums were changed since they were clipped, so neither their lot nor the noise "
                "that fits them is known. Release the sums of each lot as clipped_sum returned "
                "them; to use more records in a step, make the lots larger."
            )


@contextlib.contextmanager
def releasing() -> Iterator[None]:
    """Lets Keras's update rule run inside the `with` block, on a released vector."""
    token = _RELEASING.set(True)
    try:
        yield
    finally:
        _RELEASING.reset(token)


def check_keras_arguments(class_name: str, arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of the Keras optimizer that would act on the noise."""
    for name, way_out in (
        (
            "gradient_accumulation_steps",
            "give `fit` a larger batch_size: a lot is summed over physical batches in the memory "
            "of one, and gets its noise once",
        ),
        (
            "loss_scale_factor",
            "nothing: under mixed_float16 the loss is scaled by a fixed factor that is undone "
            "before clipping",
        ),
    ):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name}={arguments[name]!r} is not private in {class_name}: it would act on the "
                f"noise. Instead, {way_out}."
            )


def check_learning_rate(learning_rate: Any) -> Any:
    """Returns a rate for Keras: a float, or an object such as a schedule unchanged."""
    if isinstance(learning_rate, (numbers.Real, np.bool_)):  # Keras takes Python's own floats alone
        wanted = "a finite number or a Keras schedule"
        return check_number("learning_rate", learning_rate, wanted)
    return learning_rate


def check_noise_multiplier(noise_multiplier: Any, allow_no_noise: bool) -> float | None:
    """Returns σ* as a float; None stays, see `DPOptimizer`. 0 only where it is allowed."""
    if noise_multiplier is None:
        return None
    wanted = (
        "a finite number above 0 (noise std over sensitivity); "
        "tf_adadp.accounting.calibrate_noise_multiplier finds it for an ε"
    )
    noise_multiplier = check_number("noise_multiplier", noise_multiplier, wanted, at_least=0)
    if noise_multiplier == 0 and not allow_no_noise:
        raise ValueError(
            "noise_multiplier=0 trains without privacy (ε = ∞). If that is what you want, as a "
            "baseline, say allow_no_noise=True; otherwise give a number above 0."
        )
    return noise_multiplier


def check_clip(l2_norm_clip: Any) -> float | tuple[tuple[str, float], ...] | QuantileClip:
    """Returns l2_norm_clip as a float or a QuantileClip, or its bounds as pairs (prefix, bound), in
    no dict that could be changed in place.
    """
    wanted = (
        "a finite number above 0, a dict {variable path prefix: such a number}, or a "
        "tf_adadp.QuantileClip()"
    )
    if isinstance(l2_norm_clip, QuantileClip):
        return l2_norm_clip
    if not isinstance(l2_norm_clip, dict) or not l2_norm_clip:
        return check_number("l2_norm_clip", l2_norm_clip, wanted, above=0)
    return tuple(
        (str(prefix), check_number(f"l2_norm_clip[{prefix!r}]", bound, wanted, above=0))
        for prefix, bound in l2_norm_clip.items()
    )


def check_automatic_clipping(gamma: Any) -> float | None:
    """Returns γ of automatic clipping as a float, or None."""
    if gamma is None:
        return None
    wanted = "None or γ, a number above 0"
    gamma = check_number("automatic_clipping", gamma, wanted, above=0)
    L2Ball(1.0, gamma=gamma)  # checks the range
    return gamma


def check_microbatch_size(microbatch_size: Any) -> int:
    """Returns k ≥ 1, the number of examples in a slot."""
    wanted = "an integer of at least 1; 1 clips every example by itself and adds the least noise"
    return check_integer("microbatch_size", microbatch_size, wanted, at_least=1)


def check_seed(seed: Any) -> int | None:
    """Returns a seed for tests as an int, or None."""
    return None if seed is None else check_integer("seed", seed, "an integer (tests only) or None")


def check_lot_size(expected_lot_size: Any) -> None:
    """Refuses an expected lot size that is not above 0, where its value is known."""
    known = tf.get_static_value(expected_lot_size)
    known = expected_lot_size if known is None else known
    if not tf.is_tensor(known):
        check_number("expected_lot_size", known, above=0)


def check_shapes(
    sums: Sequence[tf.Tensor], variables: Sequence[keras.Variable], beside: Sequence[str] = ()
) -> None:
    """Refuses sums whose shapes are not those of the variables and one scalar per statistic."""
    shapes = [tuple(v.shape) for v in variables]
    if [tuple(s.shape) for s in sums] != shapes + [()] * len(beside):
        statistics = f", and a scalar for each of {list(beside)}" if beside else ""
        raise ValueError(
            f"sums of shapes {[tuple(s.shape) for s in sums]} for variables of shapes "
            f"{shapes}{statistics}. Pass the result of clipped_sum with this optimizer's "
            "clipping_set()."
        )


def check_regularization(gradients: Sequence | None, variables: Sequence[keras.Variable]) -> None:
    """Refuses gradients of regularisers that are not one per variable."""
    if gradients is not None and len(gradients) != len(variables):
        raise ValueError(
            f"regularization_gradients has {len(gradients)} entries for {len(variables)} "
            "variables: give one for each, None where there is none."
        )


def _refuse_raw_gradients(optimizer):
    if not _RELEASING.get():
        raise RuntimeError(
            f"{type(optimizer).__name__} takes no raw gradients: they are not private. Wrap the "
            "model, `tf_adadp.DPModel(model)`, and compile that with this optimizer; in a custom "
            "loop call `optimizer.apply_private(clipped_sum(...), expected_lot_size)`."
        )


def _check_stored(optimizer, store):
    """Refuses the state of another optimizer, which Keras would pass by with a warning."""
    names, mine = set(store.keys()), [tuple(v.shape) for v in optimizer.variables]
    stored = len(names)
    # Of an optimizer that was never built there are at most its steps and its rate.
    if not optimizer.built or not stored or stored <= 2 < len(mine):
        return  # nothing to restore, as Keras warns
    ordered = [str(i) for i in range(stored)]
    theirs = [tuple(np.shape(store[name])) for name in ordered if name in names]
    if mine != theirs:
        differs = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
            min(len(mine), len(theirs)),
        )
        raise ValueError(
            f"the file holds {stored} variables of an optimizer, this {type(optimizer).__name__} "
            f"has {len(mine)}, and they differ from number {differs} on: it was saved by "
            "another optimizer, by one of other arguments, for other trainable weights (compare "
            "`trainable_variables`; freeze and adapt them as before), or by another version of "
            "tf_adadp. Make the model and optimizer that were saved (`load_model` does); or start "
            "its state anew with `load_weights(path, skip_mismatch=True)`, which keeps the ledger."
        )


def _read_only_names(cls):
    """Returns the read-only names: `charges`, and x and _x for every argument x of our own.

    Arguments that the Keras optimizer has act on released vectors and stay free. The others are
    baked into traced graphs and charged by: a later change would release with one value and charge
    another.
    """
    names = set()
    for base in cls.__mro__:
        parents = [
            parent
            for parent in base.__mro__
            if issubclass(parent, keras.optimizers.Optimizer) and not issubclass(parent, Guards)
        ]
        parents = {p for parent in (*parents, keras.optimizers.Optimizer) for p in parent.__mro__}
        if base not in parents:
            names |= _arguments(base).difference(*map(_arguments, parents))
    return frozenset(names | {f"_{name}" for name in names} | {"charges"})


def _arguments(cls):
    """Returns the names of the arguments of a class's own `__init__`."""
    own = vars(cls).get("__init__")
    parameters = [] if own is None else list(inspect.signature(own).parameters.values())[1:]
    return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
