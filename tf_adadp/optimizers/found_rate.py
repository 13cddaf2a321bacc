"""Finds the learning rate during training, from releases, for steps of a fixed length."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.optimizers.schedules import InverseSqrtDecay
from tf_adadp.utils.checks import check_integer
from tf_adadp.utils.keras_compat import second_moments


class FoundRate(DPOptimizer):
    """Mixin of RMSprop: the rate of tensor l is η_t·m·f_l·e_t, with η_t of `InverseSqrtDecay`.

    With g̃ the release, s the std of its noise, n_l the size of tensor l, C the clip norm, h̃ the
    mean of w·ℓ/C, released with g̃ ("loss" of `clipping.RowsBeside`, 1 % of the budget of a step):

        H = max(h̃_0, h̃_1, s_h)
        P_t = η_0/C · Σ_l √n_l · max(Σ_l g̃² − s², 0) / √(Σ_l g̃²)
        m = p·min(1, (t + 1)/10)·H² / mean_{k≤t} P_k·h̃_k   in [0.01, M·u_t]
        M = 0.35·max(min(H, 1) − s_h, 0)² / mean_{k<10} P̄_k·h̃_k   in [1, 4], and 1 for t < 9
        u_t = √((1 + t/20) / max(1, t/20)),   divided by 0.85 in a run whose end is known

    where P̄ is P without the subtraction of s², h̃_k is clipped to [0, 1], and s_h is the std of its
    noise. The 20 steps of u are those of the schedule's decay, which waits for them where m allows.
    w scales the loss as clipping scales its gradient, so P/h̃ is the part of the loss that a step at
    the full rate promises to take away, to first order: the reciprocal of Polyak's step length. m
    holds it at p = 0.35 (averaged over the steps so far, those weighted most that see a high loss),
    and at less in the first ten steps: P may grow 20-fold in four of them, before the mean follows.
    H is the loss at first. The first release is clipped to a ball, the second to a set that the
    first has shaped, so w may rise between them while the model is as it was.
    Models of few weights, such as a logistic regression on a table, have far to go with steps that
    promise little even if all of g̃ were signal. They alone get more than η_t for long.
    And with d = θ_t − θ_{t−1} the last step, v the mean square that RMSprop had before it:

        S_l = ⟨g̃_t, d⟩_l,   G_l = Σ_l (g̃² − q·s²)·|d/g̃|,   q = ρv/(ρv + (1 − ρ)g̃²),   g̃ = g̃_{t−1}
        n_l = 2·√Σ_l (s·d)²,   a_l = κ·max(G_l, 0) + n_l,   κ = min(1, max(0.7, t/60))
        x_l = (a_l − S_l)/(a_l + |S_l|)
        ln f_l ← ln f_l + x_l·(0.1 + 0.2·n_l/a_l)   where x_l > 0,   + 0.5·x_l   otherwise

    with f_l in [0.3, 1], starting at 1. G is what the last step gained to first order, S the slope
    that is left behind it, above 0 where the loss rises again: a tensor slows down while its steps
    end above where they began, at first a little earlier. The noise of g̃_t is independent of d, so
    S has no bias, and n is the size of its noise (two standard deviations). G, for given m, has
    none: RMSprop divides by an average that contains the noise of g̃_{t−1}, and of the noise in
    g̃·d only the part q is expected (Stein's lemma). If the step is divided by a shape r, so are g̃
    and s in P. Of a run of N steps that ends before step T, `plan_steps`,

        e_t = min(1, (T − t)/(0.3·N))   for t < T,   and 1 where no end is known or it has passed

    which takes 15 % of their way from the steps; where M alone limits them they get it back. And
    p = max(0.35·300/N, 0.07) in a run of N > 300 steps, and after it: the limit lasts longer where
    there is time for it.

    Why: the step of RMSprop has one length for any g̃. Steps that are mostly noise average out and
    may be long. Coherent steps do not, and the length that a network tolerates differs 30-fold
    between networks; the promised reduction of the loss measures it. As the loss falls, the promise
    counts less, and the whole rate is used. At the end the weights are still moved about by the
    noise of single steps, the more the longer they are; the last three in ten steps average it out.

    Guarantee: g̃ and h̃ are one release of multiplier σ*, s and ρ are public, θ follows from
    releases: m and f are post-processing. The number of planned steps is public, as it is for ε.

    Without noise, a loss that is 0 or below at first sets no limit. A loss above the larger of C
    and its gradient's norm counts as that value, so m is lower than necessary if steps are many
    times longer than 1.

    Args:
        learning_rate: None to find it as above; a float or a Keras schedule is used unchanged. A
            box and a dict of clip norms do not scale an example by one factor: for them None is
            `InverseSqrtDecay()`.
        **kwargs: see `DPOptimizer`.

    S includes all changes of the weights. G does not include `momentum`, `centered`, weight decay,
    regularisers, constraints, Keras's clipping of gradients, averages that overwrite weights.
    `weight_decay` follows η_t alone, without m, f and e.
    """

    _promise = 0.35  # p
    _least_promise = 0.07
    _long_run = 300  # steps, above which p falls
    _first_steps = 10
    _readings = 2  # of the loss at first
    _waits = True  # the decay, for as many steps as it takes to fall by √2
    _most = 4.0  # M
    _least = 0.01  # m
    _lowest = 0.3  # f
    _growth = 0.1  # of ln f, most in a step, where the last step was all signal
    _growth_in_noise = 0.3  # where it was all noise
    _fall = 0.5
    _deviations = 2.0
    _gain_share = 0.7  # κ at first
    _patient_after = 60  # steps, at least, until κ is 1
    _share = 0.01
    _ending = 0.3  # of the planned steps, in which the rate falls to 0

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | None,
        **kwargs: Any,
    ):
        one_factor = not isinstance(kwargs.get("l2_norm_clip"), dict)
        one_factor = one_factor and kwargs.get("clipping") != "local"
        finds_rate = learning_rate is None and one_factor
        if learning_rate is None:
            learning_rate = InverseSqrtDecay()
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.finds_rate = finds_rate
        self._multipliers = None

    @property
    def loss_share(self) -> float:
        """Returns the share of a step's budget for the loss, where the rate is found."""
        return self._share if self.finds_rate else 0.0

    def _build_private(self, variables):
        super()._build_private(variables)
        if not self.finds_rate:
            return
        ones = keras.initializers.Ones()
        self._loss = self._add_state((2,), "loss")  # h̃ and the std of its noise
        # H, ΣP·h̃, ΣP̄·h̃ of the first steps, the number of steps.
        self._promises = self._add_state((4,), "promises")
        self._rate_factor = self._add_state((), "rate_factor", initializer=ones)
        # T and N, 0 where they are not known, and the largest N so far.
        self._plan = self._add_state((3,), "plan")
        self._previous = self._add_slots("previous", variables)
        self._gains = self._add_state((len(variables),), "gains")
        self._tensor_factors = self._add_state(
            (len(variables),), "tensor_factors", initializer=ones
        )

    def _observe_loss(self, loss, stddev):
        self._loss.assign(tf.stack([loss, stddev]))

    def _observe(self, released, stddevs):
        super()._observe(released, stddevs)
        if not self.finds_rate or not released:
            return
        scales = self._step_scales() or [1.0] * len(released)
        factor = self._next_rate_factor(released, stddevs, scales)
        self._rate_factor.assign(factor * self._end_factor())
        factors = self._next_tensor_factors(*self._last_step(released, stddevs))
        self._tensor_factors.assign(factors)
        rates = tf.cast(self.learning_rate, tf.float32) * self._rate_factor.value * factors
        gains = self._unit_gains(released, stddevs, scales)
        self._gains.assign(rates * tf.stack(list(gains)))

    def _next_rate_factor(self, released, stddevs, scales):
        """Returns m of this step."""
        totals = tf.stack(
            [tf.reduce_sum(tf.square(g * c)) for g, c in zip(released, scales, strict=True)]
        )
        scaled = [s * c for s, c in zip(stddevs, scales, strict=True)]
        noise = tf.stack([tf.reduce_mean(tf.square(s)) for s in scaled])  # s broadcasts to g
        sizes = tf.constant([float(g.shape.num_elements()) for g in released])
        signal = tf.maximum(totals - sizes * noise, 0.0)
        promise = tf.reduce_sum(tf.sqrt(sizes) * tf.math.divide_no_nan(signal, tf.sqrt(totals)))
        largest = tf.reduce_sum(tf.sqrt(sizes * totals))
        loss, stddev = tf.unstack(self._loss.value)
        first, total, total_first, steps = tf.unstack(self._promises.value)
        # A reading that noise alone may show, or that overflowed, is no evidence of a small loss.
        reading = tf.maximum(tf.where(tf.math.is_finite(loss), loss, 0.0), stddev)
        first = tf.where(steps < self._readings, tf.maximum(first, reading), first)
        weight = self.learning_rate_at_first / self.current_clip_norm()
        counted = tf.stack([promise, largest]) * weight * tf.clip_by_value(loss, 0.0, 1.0)
        counted = tf.where(tf.math.is_finite(counted), counted, 0.0)
        total += counted[0]
        total_first += tf.where(steps < self._first_steps, counted[1], 0.0)
        steps += 1.0
        self._promises.assign(tf.stack([first, total, total_first, steps]))
        early = tf.minimum(steps, self._first_steps)
        # A loss makes room, its noise does not.
        shown = tf.maximum(tf.minimum(first, 1.0) - stddev, 0.0)
        room = self._promise * tf.square(shown) * self._first_steps
        most = tf.clip_by_value(tf.math.divide_no_nan(room, total_first), 1.0, self._most)
        most = tf.where(steps < self._first_steps, 1.0, most) * self._wait()
        most = tf.where(self._steps_left() > 0, most / (1.0 - self._ending / 2), most)
        allowed = self._run_promise() * tf.square(first) * steps * early / self._first_steps
        limited = (first > 0.0) & (total > 0.0)
        factor = tf.where(limited, tf.math.divide_no_nan(allowed, total), most)
        return tf.clip_by_value(factor, self._least, most)

    def _run_promise(self):
        """Returns p: a run that has time for it may go slowly at first."""
        longer = tf.maximum(self._plan.value[2] / self._long_run, 1.0)
        return tf.maximum(self._promise / longer, self._least_promise)

    def _wait(self):
        """Returns u, by which the decay is undone as far as it waits."""
        if not self._waits:
            return 1.0
        past = tf.cast(self.iterations.value, tf.float32) / self._learning_rate.decay_steps
        return tf.sqrt((1.0 + past) / tf.maximum(past, 1.0))

    def plan_steps(self, steps: int, total: int | None = None) -> None:
        """Tells how many steps a run takes, before its first: the rate falls to 0 at their end.

        Above 300 steps it is also lower at first, see p of `FoundRate`. `DPModel.fit` does so for
        itself. A loop of yours may, or leave it out: the rate does not fall to 0 then. After the
        planned steps it is as before its end, until others are planned.

        Args:
            steps: how many are to come; 0 where it is not known.
            total: how many they are with those of the run that were taken before it was resumed;
                None if there are none.

        Raises:
            ValueError: a number below 0, `total` below `steps`, or the optimizer is not built.
            RuntimeError: called inside of a `tf.function`.
        """
        steps = check_integer("steps", steps, at_least=0)
        total = check_integer("total", steps if total is None else total, at_least=steps)
        if not self.finds_rate:
            return
        if not self.built:
            raise ValueError(
                f"plan_steps({steps}) on an optimizer without variables: call "
                "optimizer.build(model.trainable_variables) first."
            )
        if not tf.executing_eagerly():
            raise RuntimeError(
                "plan_steps inside of a tf.function would plan whenever the graph runs, not once "
                "for a run. Call it from Python before the first step."
            )
        end = int(self.iterations.numpy()) + steps if steps else 0
        self._plan.assign([end, total, max(total, float(self._plan.value[2]))])

    def _end_factor(self):
        """Returns e of this step."""
        left = self._steps_left()
        falling = tf.math.divide_no_nan(left, self._ending * self._plan.value[1])
        return tf.where(left > 0, tf.minimum(falling, 1.0), 1.0)

    def _steps_left(self):
        """Returns how many steps of the plan are to come, with this one."""
        return self._plan.value[0] - tf.cast(self.iterations.value, tf.float32)

    def _last_step(self, released, stddevs):
        """Returns S and Σ(s·d)² of the last step, [tensors], and keeps the weights for the next."""
        slopes, noise = [], []
        for g, s, kept, variable in zip(
            released, stddevs, self._previous, self._trainable_variables, strict=True
        ):
            weight = tf.cast(variable, tf.float32)
            step = weight - kept
            kept.assign(weight)
            slopes.append(tf.reduce_sum(g * step))
            noise.append(tf.reduce_sum(tf.square(s * step)))
        return tf.stack(slopes), tf.stack(noise)

    def _next_tensor_factors(self, slopes, noise_energy):
        """Returns f of this step, from S and Σ(s·d)² of the last one."""
        noise = self._deviations * tf.sqrt(noise_energy)
        steps = tf.cast(self.iterations.value, tf.float32)
        wanted = tf.clip_by_value(steps / self._patient_after, self._gain_share, 1.0)
        allowed = wanted * tf.maximum(self._gains.value, 0.0) + noise
        room = tf.math.divide_no_nan(allowed - slopes, allowed + tf.abs(slopes))
        share = tf.math.divide_no_nan(noise, allowed)
        growth = self._growth + (self._growth_in_noise - self._growth) * share
        factors = self._tensor_factors.value * tf.exp(tf.where(room > 0, growth, self._fall) * room)
        # Before the first step there is none to judge. Kept as it is, a NaN would stay: after an
        # overflow, or in weights that are set anew.
        judged = (self.iterations.value > 0) & tf.math.is_finite(factors)
        return tf.where(judged, tf.clip_by_value(factors, self._lowest, 1.0), 1.0)

    def _unit_gains(self, released, stddevs, scales):
        """Yields the gain of the next step in each tensor, for a rate of 1."""
        moments = second_moments(self)
        rho, rest, epsilon = (tf.constant(c) for c in (self.rho, 1 - self.rho, self.epsilon))
        for g, s, scale, velocity in zip(released, stddevs, scales, moments, strict=True):
            square = tf.square(g)
            before = rho * tf.cast(velocity, tf.float32) + epsilon
            moment = before + rest * square
            signal = square - tf.square(s) * (before / moment)
            yield tf.reduce_sum(scale * signal * tf.math.rsqrt(moment))

    def _step_scales(self) -> Sequence[tf.Tensor] | None:
        """Returns factors of the step per variable, besides the rate; None for 1. A hook."""
        return None

    @property
    def learning_rate_at_first(self) -> float:
        """Returns η_0 of the schedule."""
        return self._learning_rate.initial_learning_rate

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if self.finds_rate:  # once for all variables
            self._multipliers = tf.unstack(self._rate_factor.value * self._tensor_factors.value)
        try:
            super()._backend_update_step(grads, trainable_variables, learning_rate)
        finally:
            self._multipliers = None

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Applies Keras's rule to one variable, at its own rate."""
        if self._multipliers is not None:
            factor = self._multipliers[self._get_variable_index(variable)]
            learning_rate = learning_rate * tf.cast(factor, learning_rate.dtype)
        super().update_step(gradient, variable, learning_rate)

    @property
    def learning_rate(self) -> Any:
        """Returns η_t; of a rate that is found, without its factors, and then it cannot be set."""
        return super().learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        if self.finds_rate:
            raise TypeError(
                f"This {type(self).__name__} was made without learning_rate and finds one for each "
                f"tensor, so none can be set. Make it with a rate, "
                f"{type(self).__name__}(learning_rate=0.01, ...), and compile again."
            )
        keras.optimizers.RMSprop.learning_rate.fset(self, learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = super().get_config()
        return {**config, "learning_rate": None} if self.finds_rate else config
