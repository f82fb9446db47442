"""How many bytes a step may compare so that it takes no longer than a budget says: the logic, without a device.

A step compares the slots with ``(slot + step) % N == 0``; this module chooses N.  The cost of a share is measured as a
user would see it: now and then one call compares more than its neighbours do, and the difference is the price::

    time(N) = rest + comparing everything / N

The alternatives were worse.  Events around our own kernels cannot be put into a CUDA graph that is replayed, and on a
side stream the time of the kernels says little about the step's: at 64 requests of 4,096 tokens
the bytes of 1/64 of the slots are 134 us of an H200's bandwidth and added 40 us to a step, since attention then finds
them in its cache.  A difference counts work that the model or Python hides as free.  It is noisy, so the larger share
is chosen large enough to be seen (:data:`SEEN`), a few times in a hundred calls, and the difference between the
neighbours is added to the price.

The other work (identity, fingerprints of writes) is the same at every share, so no difference shows it.  It is
subtracted from the budget as far as it is known: the host's time while the device was waiting for it
(:func:`usually`), and a typical time for each op of a graph (:data:`SECONDS_PER_OP`), at most :data:`GUESS_AT_MOST` of
the budget.

All of these are fractions of a step, which lasts from the start of one call to the start of the next, and not of the
time that a call takes its device.  A served model whose graph ran for 0.13 ms (H200) made a step every 2.2 ms, since
its engine waited for the host.  As a fraction of the 0.13 ms, 20 us of our Python were 15 %, and N was 4,096 for half
a minute.

What a share costs grows with what is stored.  With a price learned from one request, 64 requests of the same context
took 4.6 % longer for hundreds of steps (H200), since a step itself was only 1.4 times as long.  So a price is that of
so many stored tokens, where they are known, and N follows them from one step to the next.

N is a power of two, so that changing it keeps the promise: **in any M steps in a row each slot is compared,
where M is the largest N in use in them.**  Among M steps in a row there is one with ``(slot + step) % M == 0``; the N
of that step divides M, so ``(slot + step) % N == 0`` as well.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

#: N before a price is known, and its bounds.  At 2 a larger share is left to measure the price with.
START, FEWEST, MOST = 64, 2, 4096

#: How much longer a call that compares more should take: enough to be seen, and little in a hundred calls.  Where calls
#: vary a lot, this many times their variation.
SEEN, ABOVE_NOISE = 0.1, 3

#: A difference of this many times the calls' variation, in all readings but one, is clear.  A smaller one only gives an
#: upper bound of the price.  Times of a small graph have two or three values: their median variation may be none.
CLEAR = 2

#: Readings per decision, and calls between readings until settled for the first time and afterwards.
READINGS, OFTEN, SELDOM = 5, 4, 128

#: Calls between readings where a share was settled before, and no new size is stored.  A call that is measured takes
#: 0.15 ms longer (1B, H200), and on a host of uneven speed a share is often decided anew.
ANEW = 16

#: Calls that differ by more were not alike, such as a prefill among decode steps; after this many such readings in a
#: row, readings become less frequent.
UNLIKE, PATIENCE = 0.25, 24

#: N follows what is stored down only as if it were this many times as much: with less stored a step is shorter as well.
CAREFUL = 2

#: Readings of one decision differ by no more in what is stored.
ALIKE = 2

#: A step that takes this many times longer or shorter than those of the last decision triggers a new one, unless it is
#: known how much is stored: see :meth:`Controller._follow_speed`.
OTHER_WORK = 1.5

#: What an op of ours adds to a step of a GPU besides comparing: 64 requests of 4,096 tokens, 66 ops beside the model,
#: 100 us on an H200; inline twice that.
SECONDS_PER_OP = 1.5e-6
GUESS_AT_MOST = 0.75

#: The part of the budget that comparing gets even if the rest uses all of it, so that every slot is compared
#: eventually.
LEFT_FOR_BYTES = 1 / 8

#: Decisions in a row by which our other work takes more than the budget, before it is said.  The first one sees calls
#: whose Python runs for the first times.
CERTAIN = 3

#: So many seconds between the end of a call and the next one are part of a step, at most: in a longer pause the caller
#: may have been idle.
IDLE = 5e-3

#: N is lowered only if the larger share fits with this much room to spare, so that N does not oscillate.
SPARE = 1.25


@dataclasses.dataclass(frozen=True)
class Reading:
    """Three calls in a row, of which the second compared more.

    Attributes:
        before, probe, after: seconds that they took their device.
        every, probed: N of the outer ones, and of the second.
        waits: seconds that the device waited for our other work, in each call that was looked at for it.
        guessed: seconds that our other work is estimated to cost in addition.
        between: seconds from one call to the next.
        stored: tokens that are stored, of which the calls compare a share; 0 if nobody knows.
    """

    before: float
    probe: float
    after: float
    every: int
    probed: int
    waits: tuple[float, ...] = ()
    guessed: float = 0.0
    between: float = 0.0
    stored: float = 0.0

    @property
    def usual(self) -> float:
        """Seconds of a call that compares as usual."""
        return (self.before + self.after) / 2

    @property
    def step(self) -> float:
        """Seconds of a step, of which the others are fractions."""
        return min(max(self.usual, self.between), self.usual + IDLE)

    @property
    def noise(self) -> float:
        """How much calls differ that should be alike, as a fraction."""
        return abs(self.before - self.after) / self.step

    @property
    def more(self) -> float:
        """How much longer the call took that compared more, as a fraction."""
        return max(self.probe - self.usual, 0.0) / self.step

    @property
    def stands_out(self) -> bool:
        """The call that compared more took longer than both others, as one in three does by chance."""
        return self.probe > max(self.before, self.after)

    @property
    def price(self) -> float:
        """What comparing all bytes would add to a step, as a fraction; an upper bound where the difference is
        unclear."""
        return (self.more + self.noise) / (1 / self.probed - 1 / self.every)


class Controller:
    """Raises and lowers N from readings.

    Attributes:
        budget: how much longer a step may take, as a fraction.
        needed: N by this process's own readings.
        elsewhere: N that another process needs, whose steps wait for this one's; 1 if there is none.
        probed: N of the next call that compares more.
        settled: the price is known; until then N has a value that is cheap on most models.
        rest: what our other work was measured to add to a step, as a fraction; ``guessed``: the estimated rest of it.
        price: what comparing all bytes would add; None until known.
        stored: tokens that were stored when the price was learned; 0 if nobody knows.
        between: seconds from one step to the next.
    """

    def __init__(self, budget: float):
        self.budget, self.needed, self.probed = budget, START, START // 4
        self.elsewhere = 1
        self.settled = self._was_settled = False
        self.rest = self.guessed = self.between = self.stored = 0.0
        self.price: float | None = None
        self._exceeded = 0  # decisions in a row by which the rest takes more than the budget
        self._known = 0.0, 0.0  # the shortest and the longest step that the price is known for
        self._step = 0.0  # that the price and the rest are fractions of
        self._discarded = 0
        self._readings: list[Reading] = []
        # powers of two of what was stored: in any step, and before a price was learned
        self._met: set[int] = set()
        self._learned: set[int] = set()

    @property
    def every(self) -> int:
        """N as it should be."""
        return max(self.needed, self.elsewhere)

    def every_for(self, stored: float) -> int:
        """N of a step with so many tokens stored; 0 if nobody knows."""
        every = self.every
        if not stored or not self.stored:
            return every
        wanted = every * stored / self.stored
        while every < wanted and every < MOST:
            every *= 2
        while every > FEWEST and every / 2 >= wanted * CAREFUL:
            every //= 2
        return every

    def alike(self, every: int, stored: float) -> tuple[float, float]:
        """From how few to how many tokens may be stored without anything to be done about it, where so many are and
        N = ``every`` is in use: it is what :meth:`every_for` says, or up to four times that.

        When N was looked at for each 16th part that was stored more, that was every 32 steps of one request of 512.
        """
        power = _power_of(stored)
        least, most = 2 ** (power - 0.5), 2 ** (power + 0.5)  # sizes are learned by powers of two
        if not self.stored:
            return least, most
        fits = self.stored * every / self.every
        if every > 4 * FEWEST:
            fewer = 8 if every // 8 >= self.every else 8 * CAREFUL
            least = max(least, math.nextafter(fits / fewer, math.inf))
        if every < MOST:
            most = min(most, fits if every >= self.every else fits / CAREFUL)
        return least, most

    def note_stored(self, stored: float) -> None:
        """Steps have so many tokens stored from here on.

        A price that was learned with less is scaled up, and the noise in it as well: it is learned anew, once for each
        size.
        """
        self._met.add(_power_of(stored))
        if self.stored and not self._met <= self._learned:
            self.settled = False

    @property
    def period(self) -> int:
        """Calls from one reading to the next."""
        if self.settled or self._discarded >= PATIENCE:
            return SELDOM
        return ANEW if self._was_settled and self._met <= self._learned else OFTEN

    @property
    def over(self) -> bool:
        """Our other work alone takes more than the budget, by several decisions in a row."""
        return self._exceeded >= CERTAIN

    def take(self, reading: Reading) -> bool:
        """Learn from a reading; whether ``every`` may have changed."""
        if reading.usual <= 0 or reading.noise > UNLIKE:
            self._discarded += 1
            return False
        self._discarded = 0
        shortest, longest = self._known
        changed = False
        if self.settled and not shortest / OTHER_WORK < reading.step < longest * OTHER_WORK:
            self._readings.clear()
            if reading.stored and self.stored:
                changed = self._follow_speed(reading)
            else:
                self.settled = False
        if self._readings and not 1 / ALIKE <= (reading.stored or 1) / (self._readings[0].stored or 1) <= ALIKE:
            self._readings.clear()
        self._readings.append(reading)
        if len(self._readings) < READINGS:
            return changed
        self._decide()
        return True

    def _follow_speed(self, reading: Reading) -> bool:
        """Steps have become faster or slower, with what is stored known: comparing takes as many seconds as before.

        Where steps wait for a host whose speed changes by a half from one second to the next, each change was a reason
        to measure anew: 17 of 100 steps were measured or looked at, and took 0.16 of 2.2 ms longer (1B, H200).

        Returns:
            whether a smaller share is due; for a larger one there is time until the next decision.
        """
        step, self.between = reading.step, reading.between
        self._known = min(self._known[0], step), max(self._known[1], step)
        if step >= self._step or self.price is None:
            return False
        faster, self._step = self._step / step, step
        self.price, self.rest = self.price * faster, self.rest * faster
        before, self.needed = self.needed, max(self.needed, share_for(self.price, self._room()))
        return self.needed != before

    def _room(self) -> float:
        """What is left of the budget for comparing bytes."""
        return max(self.budget - self.rest - self.guessed, self.budget * LEFT_FOR_BYTES)

    def _decide(self) -> None:
        seen, before = self._readings, self.needed
        self._known = min(r.step for r in seen), max(r.step for r in seen)
        self._step = statistics.median(r.step for r in seen)
        self.between = statistics.median(r.between for r in seen)
        self.rest = usually([wait / r.step for r in seen for wait in r.waits])
        self._exceeded = self._exceeded + 1 if self.rest > self.budget else 0
        guess = statistics.median(r.guessed / r.step for r in seen)
        self.guessed = min(guess, GUESS_AT_MOST * self.budget)
        before = self._take_over(statistics.median(r.stored for r in seen), before)
        self._learned |= self._met  # also where batches of two sizes took turns, and one of them was measured
        bounded = self.probed == 1  # by the largest share that there is
        clear = self._know_price(seen)
        assert self.price is not None
        room = self._room()
        self.needed = max(FEWEST, share_for(self.price, room), min(before, share_for(self.price * SPARE, room)))
        self.probed = min(self.probed, self.needed // 2)
        falling = self.needed < before and not clear and not bounded
        self._was_settled = self._was_settled or self.settled
        self.settled = before / 2 <= self.needed <= before * 2 and not falling
        self._readings.clear()

    def _take_over(self, stored: float, before: int) -> int:
        """Other tokens are stored than when the price was learned: scale it, and N as it was, which is returned."""
        if stored and self.stored:
            factor, scaled = stored / self.stored, before
            self.price = self.price * factor if self.price is not None else None
            while scaled < MOST and factor > 1:
                scaled, factor = scaled * 2, factor / 2
            while scaled > FEWEST and factor <= 0.5:
                scaled, factor = scaled // 2, factor * 2
            self.probed = max(1, self.probed * scaled // before)
            before = scaled
        self.stored = stored
        return before

    def _know_price(self, seen: list[Reading]) -> bool:
        """The price, and how much the next call that compares more is to compare; whether it is no mere bound."""
        price, noise, more = (statistics.median(getattr(r, name) for r in seen) for name in ("price", "noise", "more"))
        if more > CLEAR * noise and sum(r.stands_out for r in seen) >= READINGS - 1:
            self.price = price
            self.probed = share_for(price, max(min(SEEN, 10 * self.budget), ABOVE_NOISE * noise))
            return True
        self.price = price if self.price is None else min(price, self.price)
        self.probed = max(1, self.probed // 2)
        return False


def _power_of(stored: float) -> int:
    return round(math.log2(max(stored, 1)))


def usually(waits: Sequence[float]) -> float:
    """How long calls keep the device waiting: the median of those that do, times their share of all calls.

    A host that reads tokens now and then is ahead of the device in the calls between, which cost nothing.  The median
    of all calls would leave out the smaller part of them, and a mean would follow one garbage collection.
    """
    some = [wait for wait in waits if wait > 0]
    return statistics.median(some) * len(some) / len(waits) if some else 0.0


def share_for(price: float, room: float) -> int:
    """The smallest power of two N whose share of the price fits into the room; 1 is all, more than MOST is nothing."""
    every = 1
    while price / every > room and every < MOST:
        every *= 2
    return every


class Tour:
    """Which of the slots stored before a number of calls of one graph were compared in them."""

    def __init__(self) -> None:
        self.calls = 0
        self._runs: list[list[int]] = []  # N, and how many calls in a row had it
        self._done = False

    def note(self, every: int, calls: int = 1) -> None:
        """One more call, or several, which compare a share of 1/``every``."""
        self.calls += calls
        if self._done or not calls:
            return
        if self._runs and self._runs[-1][0] == every:
            self._runs[-1][1] += calls
            return
        self._runs.append([every, calls])
        self._done = len(self._runs) % 64 == 0 and self.unseen() == 0

    def unseen(self) -> float:
        """The share of the slots that were not compared; 0 before the first call."""
        if self._done or not self._runs:
            return 0.0
        modulus = max((every for every, _ in self._runs), default=1)
        had, step = bytearray(modulus), 0
        for every, calls in self._runs:
            for turn in range(step, step + min(calls, every)):
                first = -turn % every
                had[first::every] = b"\1" * len(range(first, modulus, every))
            step += calls
        return 1 - sum(had) / modulus
