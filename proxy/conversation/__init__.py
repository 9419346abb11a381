"""The parts of an assistant's turn: reasoning, text and tool calls, found in the text that a model writes.

`thinking` finds reasoning, `calls` the calls that a model writes by itself, `forced` those that a grammar prescribes.
`dialect` chooses by the chat template, and shows tools to templates without a place for them. `parts` has what all
parsers return, and the chain of a turn's parsers; `json_value` finds the end of a JSON value. `store` keeps answers for
later requests. Every parser is fed pieces of text, and returns the same parts however the text is cut. Imports
`common` only.
"""
