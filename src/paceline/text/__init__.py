"""Text, which lives in the router alone: tokenizer, chat template, detokenizer and stop strings. No torch."""

from paceline.text.chat_template import ChatTemplate, Message
from paceline.text.detokenizer import Detokenizer
from paceline.text.stop import StopMatcher, StopStep, check_stops
from paceline.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Message", "StopMatcher", "StopStep", "Tokenizer", "check_stops"]
