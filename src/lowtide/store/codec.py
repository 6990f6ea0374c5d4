"""For codecs of your own."""

from lowtide.extensions.moves.store.codec import Codec, CodecError, Form

__all__ = ["Codec", "CodecError", "Form"]
