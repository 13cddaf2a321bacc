"""Stateless, keyed Gaussian noise, added once per lot; and the keys that it is drawn under.

The noise of one variable at one step is a function of (key, step, variable index) and the shapes of
the variables only: all replicas of a distributed run draw the same, once per lot however many
physical batches it has. Anyone who has the key can subtract the noise. So the key comes from the
operating system's entropy and never leaves memory, except in the private state file that a user
asks for (`DPModel.save_private_state`).

**Information in the bits of a release.** The set of floats that x + n can take, for a float32 sum x
and float32 noise n, depends on the low bits of x, however good the generator of n. Where the noise
is of a coarser binade than the sum and cancels some of it, the release ends in the last bit of x
(Mironov 2012, "On significance of the least significant bits for differential privacy"; Haney et
al. 2022, "Precision-based attacks and interval refining"; against training, Jin et al. 2022, "Are
we there yet?"). A number made of few random bits can be searched for those that led to it.
`add_gaussian(secure=True)`, the argument `secure_noise` of every optimizer, prevents both:

- *One grid.* Sum and noise are rounded, each by itself, to multiples of a power of two between 2⁻²⁵
  and 2⁻²⁴ of the noise's standard deviation, and added as integers, exactly. With x' the rounded
  sum and N Gaussian, x' + round(N) = round(x' + N): the release is a function of the Gaussian
  mechanism on x'. So events and accountants stay the same, for subsampled lots too. (For a discrete
  Gaussian, Canonne, Kamath and Steinke 2020, subsampled bounds would have to be proved anew, and to
  draw it exactly on so fine a grid takes integers of more than 64 bits.)
- *Sensitivity.* Rounding moves the difference of two neighbouring sums by up to one grid step in
  each of D coordinates, in units of the noise by up to 2⁻²⁴·√D. The noise is made larger by the
  factor 1 + σ*·2⁻²⁴·√D (1.0002 for σ* = 4 and 795,010 weights), which brings it back to 1/σ*.
- *Finer noise.* 64 random bits each for radius and angle, in float64: thousands of pairs of bits
  lead to every grid point, and the tails end at 9.4 standard deviations in place of 6.7 (the ideal
  noise puts less than 10⁻¹³ beyond that in 10⁶ coordinates). The mean of four float draws (Holohan
  and Braghin 2021, "Secure random sampling in differential privacy"), as other toolkits have it,
  would make the search hopeless too, cost as much, and still show the last bits of x.

**Limits.** `secure_noise` does not defend against

- an attack on the generator: Philox-4x32-10 is fast and not a cipher; an attacker who knows many of
  the noise's numbers and can compute the key has all the others;
- the rounding of the float32 sum over the examples, which may differ between neighbours by more
  than the sensitivity (Casacuberta et al. 2022, "Widespread underestimation of sensitivity");
- errors of logarithm, root and cosine: they are float64 functions, and there is no proof that the
  grid's probabilities are the Gaussian's to the last digit;
- timing: the operations depend on shapes alone, but some take longer for some floats.

Choices by noisy comparison (AGD's step length, SADPSGD's acceptance) publish no bits of their
noise, and do not change.
"""

from tf_adadp.noise.draws import add_gaussian, gaussian, gaussians, stream
from tf_adadp.noise.keys import SecretKey, new_key

__all__ = ["SecretKey", "add_gaussian", "gaussian", "gaussians", "new_key", "stream"]
