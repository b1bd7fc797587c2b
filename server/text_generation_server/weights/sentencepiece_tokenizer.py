"""Makes a tokenizer of the tokenizers library that cuts texts as a sentencepiece model does: BPE, which joins pieces
pair by pair, or Unigram, which finds the pieces of the highest total score.

One difference is left, as in every such conversion: where two joins of the same score overlap, sentencepiece takes the
left one, and the library the one that is first in its list. Models that sentencepiece has trained have no equal scores.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.vocabulary import TokenKind
from text_generation_server.weights.added_tokens import Additions
from text_generation_server.weights.sentencepiece import Algorithm, SentencePieces

SPACE = "\u2581"
MAX_SPACES = 10_000  # dropped at the start of a text that is made of ids


def make_tokenizer(model: SentencePieces, additions: Additions, where: str) -> Tokenizer:
    """WeightsError, which begins with `where`, for a model that the tokenizers library cannot imitate."""
    if reason := _refusal(model):
        raise WeightsError(f"{where}: {reason}: use a repository that has a tokenizer.json")
    tokenizer = Tokenizer(_bpe(model) if model.algorithm is Algorithm.BPE else _unigram(model))
    tokenizer.normalizer = _normalizer(model)
    if model.algorithm is Algorithm.UNIGRAM and model.byte_fallback:
        # The text <0x41> means its six characters. A cut after < keeps Unigram from taking it for the piece of a byte.
        cut = Regex("<(?=0x[0-9A-F]{2}>)")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(cut, "merged_with_previous")
    tokenizer.decoder = _decoder(model)
    _add_tokens(tokenizer, model, additions, where)
    _put_around(tokenizer, additions, where)
    return tokenizer


def _refusal(model: SentencePieces) -> str | None:
    reasons = {
        f"its algorithm is {model.algorithm.name}, neither BPE nor Unigram": model.algorithm
        not in (Algorithm.BPE, Algorithm.UNIGRAM),
        "it puts spaces behind words": model.whitespace_is_suffix,
        "it keeps spaces as they are": not model.escape_whitespaces,
        "some of its pieces are unused": bool(model.of_kind(TokenKind.UNUSED)),
        "it has symbols of its user's, and a space before every text": model.add_dummy_prefix
        and bool(model.of_kind(TokenKind.USER_DEFINED)),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _bpe(model: SentencePieces) -> models.BPE:
    scores = {piece.text: piece.score for piece in model.of_kind(TokenKind.NORMAL)}
    merges = [
        (text[:place], text[place:])
        for text in scores
        for place in range(1, len(text))
        if text[:place] in scores and text[place:] in scores
    ]
    merges.sort(key=lambda pair: (-scores["".join(pair)], len(pair[0])))
    return models.BPE(
        vocab={piece.text: id for id, piece in enumerate(model.pieces)},
        merges=merges,
        unk_token=model.of_kind(TokenKind.UNKNOWN)[0].text,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _unigram(model: SentencePieces) -> models.Unigram:
    vocab = [(piece.text, piece.score) for piece in model.pieces]
    unknown = model.pieces.index(model.of_kind(TokenKind.UNKNOWN)[0])
    return models.Unigram(vocab, unk_id=unknown, byte_fallback=model.byte_fallback)


def _normalizer(model: SentencePieces) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if model.remove_extra_whitespaces:
        # At the end of a text, sentencepiece does not tell a U+2581 of the text from a space.
        steps.append(normalizers.Replace(Regex(SPACE + r"+\z"), ""))
    return normalizers.Sequence(steps)


def _decoder(model: SentencePieces) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.remove_extra_whitespaces:
        # sentencepiece drops one space of each piece until there is a text; such models have no pieces with more.
        steps.append(decoders.Strip(" ", MAX_SPACES, 0))
    elif model.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _add_tokens(tokenizer: Tokenizer, model: SentencePieces, additions: Additions, where: str) -> None:
    """Pieces that are found in a text before all others, and tokens that the model does not have."""
    special = (TokenKind.CONTROL, TokenKind.UNKNOWN)
    found = {
        # A symbol may have spaces, which the normalizer has replaced.
        id: AddedToken(piece.text, special=piece.kind in special, normalized=piece.kind is TokenKind.USER_DEFINED)
        for id, piece in enumerate(model.pieces)
        if piece.kind in (*special, TokenKind.USER_DEFINED)
    }
    for id, token in sorted({**found, **additions.tokens}.items()):
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != id:
            raise WeightsError(f"{where}: the token {ascii(token.content)[:60]} cannot have the id {id}")


def _put_around(tokenizer: Tokenizer, additions: Additions, where: str) -> None:
    texts = [text for text in (additions.before, additions.after) if text is not None]
    if not texts:
        return
    ids: dict[str, Any] = {text: tokenizer.token_to_id(text) for text in texts}
    if missing := [text for text, id in ids.items() if id is None]:
        raise WeightsError(f"{where} has no token {ascii(missing[0])[:60]}, which the other files name")
    single = [text for text in (additions.before, "$A", additions.after) if text is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
