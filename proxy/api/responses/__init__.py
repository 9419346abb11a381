"""POST /v1/responses: OpenAI's newer form of a conversation, answered by the path of chats.

`endpoint` answers, `output` makes items and events of an answer's parts, `request` turns a request into that of a chat.
Imports the chat's modules, and what these import.
"""
