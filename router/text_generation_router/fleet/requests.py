"""One front's requests to engines in other processes, with all that another engine needs to go on with a request."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isfinite

from text_generation_router.engine.open_request import OpenRequest
from text_generation_router.engine.protocol import Ended, FirstStep, Tokens
from text_generation_router.errors import RefusedError
from text_generation_router.fleet.suspects import SuspectTrial
from text_generation_router.fleet.values import EngineFirst
from text_generation_router.scheduling.blame import MAX_SUSPICIONS
from text_generation_router.scheduling.prompt_logprobs import KnownLogprobs, PromptLogprobs
from text_generation_router.scheduling.request import GenerationRequest, Past
from text_generation_router.wire.steps import TokenRun, check_positions
from text_generation_router.wire.submits import Submitted
from text_generation_router.wire.version import WireError

# Maximum number of tokens beyond the credits of a request: tokens of steps that were sent while the request had
# credits.
BEYOND_CREDITS = 512


@dataclass(slots=True, eq=False)
class RemoteGroup:
    """Requests of one prompt, all of them on the same engine. Times are those of the front's clock."""

    number: int  # rises with each group that arrives
    request: GenerationRequest  # the request of the first member
    arrived_s: float
    on_answer: Callable[[RefusedError | None], None]
    members: "dict[int, RemoteRequest]" = field(default_factory=dict)  # the requests that have not ended, by index
    engine: int | None = None  # number of the engine that has the group; None: it waits for an engine
    submitted_s: float = 0.0  # time of the Submit to that engine
    wire_indexes: list[int] = field(default_factory=list)  # indexes of the members in the Submit
    is_accepted: bool = False  # whether any engine has accepted the group
    is_answered: bool = False  # whether this engine has answered the Submit
    is_leaving: bool = False  # whether the engine was sent a Withdraw for the group
    is_suspect: bool = False  # whether the group was submitted as suspects
    has_run: bool = False  # whether any engine has decided the first step of a member
    digest: bytes | None = None  # digest of the engine that made the group's tokens; None: no token was made
    suspicions: int = 0  # losses counted before a member had to run alone, as in `Blame`
    counts: int = 0
    has_moved: bool = False  # whether any engine was sent a Withdraw for the group
    moved: "RemoteGroup | None" = None  # the group of the members that have left this one for another engine
    origin: "RemoteGroup | None" = None  # the group that the members of this one have left
    stranded_s: float | None = None  # since when only engines of other builds are connected

    def answer(self, refused: RefusedError | None = None) -> None:
        """Calls `on_answer`, unless it was called before. None: the group is accepted."""
        if not self.is_accepted:
            self.is_accepted = True
            self.on_answer(refused)

    @property
    def is_new(self) -> bool:
        """Whether no engine has accepted the group yet."""
        return not self.is_accepted and self.digest is None

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens of prompt and outputs. An engine that begins with the group computes the prompt once."""
        return len(self.request.input_ids) + sum(len(member.output_ids) for member in self.members.values())

    @property
    def can_leave(self) -> bool:
        """Whether the group may be asked back from the engine: no member is known to have begun there."""
        return self.is_answered and not self.is_leaving and not self.has_begun_here

    @property
    def has_begun_here(self) -> bool:
        """Whether any member is known to have begun on the engine."""
        return any(member.is_begun for member in self.members.values())

    @property
    def is_proven_here(self) -> bool:
        """Whether any member has made a token on the engine."""
        return any(member.attempt_begun_s for member in self.members.values())


@dataclass(slots=True, eq=False)
class RemoteRequest(OpenRequest):
    """A request that any engine may have. Times are those of the front's clock, whichever engine has reported them."""

    group: RemoteGroup
    output_ids: list[int] = field(default_factory=list)
    deadline_s: float | None = None
    wire_index: int = 0  # index on the current Work stream
    debt: int = 0  # tokens by which the credits were below zero at the last Submit
    attempt_begun_s: float = 0.0  # time of the first step on the current engine, sent with the first tokens
    is_begun: bool = False  # whether the current engine has reported that the first step is decided
    cached_tokens: int = 0
    has_given: bool = False  # whether the sink has got its FirstStep
    prompt: KnownLogprobs | None = None  # log-probabilities of the prompt that the current engine has given

    def submitted(
        self, index: int, now: float, served_elsewhere: float, trial: SuspectTrial | None = None
    ) -> Submitted:
        """The request as it is now, for a Submit. `trial`: None unless the request is a suspect."""
        asked, group = self.request, self.group
        self.wire_index, self.attempt_begun_s, self.prompt, self.is_begun = index, 0.0, None, False
        if asked.prompt_logprobs is not None:
            if self.has_given:
                asked = replace(asked, prompt_logprobs=None)
            else:
                self.prompt = KnownLogprobs(len(asked.input_ids))
        if self.deadline_s is not None:
            asked = replace(asked, timeout_s=max(self.deadline_s - now, 0.0))
        past = Past(
            output_ids=tuple(self.output_ids),
            age_s=now - group.arrived_s,
            has_run=group.has_run,
            # A suspect that is tried alone is alone in the engine's steps too (scheduling/blame.py).
            suspicions=MAX_SUSPICIONS if trial is not None and trial.is_alone else group.suspicions,
            counts=group.counts,
            served_elsewhere=served_elsewhere,
        )
        self.debt = max(-self.credits, 0)
        return Submitted(index, asked, past, max(self.credits, 0), trial.group if trial is not None else "")

    def take(self, run: TokenRun, first: EngineFirst | None, now: float) -> Tokens | None:
        """The tokens of `run` that are new, for the sink. None: no token is new. Raises WireError if tokens are missing
        before them, or if there are more tokens than the request may get."""
        known = len(self.output_ids)
        if (new := check_positions(run, known)) is None:
            return None
        ids, tops = new.ids, new.tops
        if known + len(ids) > self.request.max_new_tokens:
            raise WireError(f"a request of {self.request.max_new_tokens} tokens got {known + len(ids)}")
        if first is not None:
            self.begin(now - first.inference_s, first)
        elif not self.attempt_begun_s:
            raise WireError("tokens came before the message with the request's first step")
        first_step = None if self.has_given else self._first_step()
        self.credits -= len(ids) + sum(map(len, tops))
        if self.credits < 0 and -self.credits > BEYOND_CREDITS * (1 + self.request.sampling.top_n_tokens):
            raise WireError("a request got many more tokens than its credits")
        self.output_ids += ids
        return Tokens(ids, new.logprobs, tops, now - self.begun_s, first_step)

    def computed(self, first: EngineFirst, now: float) -> Tokens:
        """The only answer, without a token, to a request whose `max_new_tokens` is 0."""
        self.begin(now - first.inference_s, first)
        return Tokens((), (), (), now - self.begun_s, self._first_step())

    def begin(self, begun_s: float, first: EngineFirst | None = None) -> None:
        """Notes the first step on the current engine, at `begun_s`."""
        if not isfinite(begun_s):
            raise WireError("a time is not a number")
        begun_s = max(begun_s, self.group.arrived_s, self.lost_s)
        self.attempt_begun_s, self.is_begun = begun_s, True
        if not self.begun_s:
            self.begun_s = begun_s
            self.cached_tokens = min(first.cached_tokens, len(self.request.input_ids)) if first is not None else 0
        if self.lost_s:
            self.note_replay(begun_s)

    def _first_step(self) -> FirstStep:
        known = None
        if self.prompt is not None:
            if not self.prompt.are_complete:
                raise WireError("the first tokens came before the log-probabilities of the prompt")
            known, self.prompt = self.prompt.joined(), None
        self.has_given = True
        return FirstStep(self.begun_s - self.group.arrived_s, self.cached_tokens, known)

    def add_prompt(self, start: int, piece: PromptLogprobs) -> None:
        """Takes log-probabilities of the prompt from position `start` on. Raises WireError for a piece that does not
        follow the piece before."""
        if self.prompt is None:
            if self.request.prompt_logprobs is None or self.attempt_begun_s:
                raise WireError("log-probabilities of a prompt came that are not wanted")
            return  # another sequence of the Submit collects the log-probabilities
        if start != self.prompt.count + 1 or start + len(piece) > len(self.request.input_ids):
            raise WireError(f"log-probabilities of a prompt from {start} on follow {self.prompt.count}")
        if piece.top_ids_PK.shape[1] != self.request.prompt_logprobs:
            raise WireError("log-probabilities of a prompt have another number of top tokens than wanted")
        self.prompt.add(start - 1, piece)

    def lose(self, now: float) -> None:
        """Notes that the engine with the request was lost."""
        self.note_loss(now)
        self.attempt_begun_s, self.is_begun = 0.0, False

    def credit(self, tokens: int) -> int:
        """Adds credits. Returns how many of them the current engine gets. Credits that were below zero at the Submit
        were sent as 0, so the first credits make up for the difference."""
        self.credits += tokens
        paid = min(self.debt, tokens)
        self.debt -= paid
        return tokens - paid

    def ended(self, reported: Ended, now: float) -> Ended:
        """Converts an engine's report of the end to the front's clock, and adds the times on earlier engines."""
        if reported.queue_s is not None and not self.attempt_begun_s:
            self.begin(now - reported.inference_s)
        if self.begun_s:
            shift_s = self.attempt_begun_s - self.begun_s
            self.replays += tuple((shift_s + lost_s, shift_s + again_s) for lost_s, again_s in reported.replays)
        return self.timed(reported, self.group.arrived_s, now)
