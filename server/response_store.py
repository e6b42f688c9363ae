"""In-memory store of responses of /v1/responses, for the next turn of a conversation."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import LlmcError, shortened
from llmc.server.errors import ApiError
from llmc.server.protocol import Item, ResponsesRequest

_Object = dict[str, Any]
_Key = tuple[str | None, str]  # name of an API key, id of a response or item


@dataclass(frozen=True)
class _Stored:
    response: bytes
    items: bytes  # of the whole conversation; the output is last
    item_ids: tuple[str, ...]
    num_inputs: int
    expires: float

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses in memory; the least recently used ones are evicted.

    Args:
        max_bytes: maximum size of all responses; 0: store none.
        ttl: lifetime of a response in seconds.
        clock: returns the time in seconds.

    Raises:
        LlmcError: a value is out of range.
    """

    def __init__(self, max_bytes: int, ttl: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
        if max_bytes < 0 or not ttl > 0:
            raise LlmcError(f"the response store has {max_bytes} bytes and a lifetime of {ttl} s, "
                            f"expected at least 0 bytes and more than 0 s; change the two options")
        self._max_bytes, self._ttl, self._clock = max_bytes, ttl, clock
        self._stored: OrderedDict[_Key, _Stored] = OrderedDict()
        self._first: dict[_Key, _Key] = {}  # first response of each item, by the item's id
        self.bytes = 0

    @property
    def enabled(self) -> bool:
        return self._max_bytes > 0

    def put(self, response: _Object, inputs: Sequence[_Object], owner: str | None = None) -> None:
        """Store a response unless it exceeds the maximum size.

        Args:
            response: the response, as JSON.
            inputs: items of the whole conversation before the response, each with an id.
            owner: name of the API key whose clients may read it; None if there are no keys.
        """
        items = [*inputs, *response["output"]]
        stored = _Stored(_json(response), _json(items), tuple(item["id"] for item in items),
                      len(inputs), self._clock() + self._ttl)
        if stored.size > self._max_bytes:
            return
        self._drop_expired()
        while self.bytes + stored.size > self._max_bytes:
            self._drop(next(iter(self._stored)))
        key = owner, response["id"]
        self._stored[key] = stored
        self.bytes += stored.size
        for item_id in stored.item_ids:
            self._first.setdefault((owner, item_id), key)

    def response(self, response_id: str, owner: str | None = None) -> bytes:
        """Return a response as JSON.

        Raises:
            ApiError: the response is not stored.
        """
        return self._get((owner, response_id)).response

    def input_items(self, response_id: str, limit: int, newest_first: bool,
                    after: str | None, owner: str | None = None) -> _Object:
        """Return a page of the input items of a response, as in the OpenAI API.

        Args:
            response_id: of the response.
            limit: maximum number of items.
            newest_first: order of the list.
            after: id of the item before the page. None: return the first page.
            owner: see `put`.

        Raises:
            ApiError: the response is not stored, or has no such item.
        """
        stored = self._get((owner, response_id))
        items = json.loads(stored.items)[:stored.num_inputs]
        ids = [*stored.item_ids[:stored.num_inputs]]
        if newest_first:
            items.reverse()
            ids.reverse()
        if after is not None and after not in ids:
            raise ApiError(f"after is '{shortened(after)}', which is not an input item of this "
                           f"response; give the id of one", param="after")
        first = 0 if after is None else len(ids) - ids[::-1].index(after)
        page = [_listed(item) for item in items[first:first + limit]]
        return {"object": "list", "data": page, "has_more": first + limit < len(items),
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None}

    def delete(self, response_id: str, owner: str | None = None) -> None:
        """Delete a response.

        Raises:
            ApiError: the response is not stored.
        """
        self._get((owner, response_id))
        self._drop((owner, response_id))

    def conversation(self, body: ResponsesRequest, owner: str | None = None) -> list[Item]:
        """Return the items of the previous response and those of the request.

        Raises:
            ApiError: a referenced response or item is not stored.
        """
        before: list[Item] = []
        if body.previous_response_id is not None:
            if not self.enabled:
                raise ApiError("previous_response_id is given, but this server stores no "
                               "responses; give the conversation as input",
                               param="previous_response_id")
            before = self._items((owner, body.previous_response_id))
        return [*before, *(self._referenced(item, owner) if item.type == "item_reference" else item
                           for item in body.items)]

    def _referenced(self, reference: Item, owner: str | None) -> Item:
        key = self._first.get((owner, reference.id or ""))
        if key is not None and key in self._stored:
            return next(item for item in self._items(key) if item.id == reference.id)
        raise ApiError(f"item '{reference.id}' is not stored; give the item itself as input", 404,
                       param="input")

    def _items(self, key: _Key) -> list[Item]:
        return [Item.model_validate(item) for item in json.loads(self._get(key).items)]

    def _get(self, key: _Key) -> _Stored:
        self._drop_expired()
        if key not in self._stored:
            raise ApiError(f"response '{key[1]}' is not stored; responses expire after "
                           f"{self._ttl:g} s or are evicted earlier; give the conversation as "
                           f"input", 404,
                           code="previous_response_not_found")
        self._stored.move_to_end(key)
        return self._stored[key]

    def _drop_expired(self) -> None:
        now = self._clock()
        for key in [key for key, stored in self._stored.items() if stored.expires <= now]:
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        dropped = self._stored.pop(key)
        self.bytes -= dropped.size
        for item_id in dropped.item_ids:
            if self._first.get((key[0], item_id)) == key:
                del self._first[key[0], item_id]


def _listed(item: _Object) -> _Object:
    """Convert an item to the format of OpenAI's lists: content parts and a status."""
    content = item.get("content")
    if item["type"] == "message" and isinstance(content, str):
        part: _Object = {"type": "output_text", "text": content, "annotations": []} \
            if item["role"] == "assistant" else {"type": "input_text", "text": content}
        item = {**item, "content": [part]}
    return {"status": "completed", **item}


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass")
