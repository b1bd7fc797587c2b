"""The LoRA adapters that clients may ask for, and how the list changes while the server runs.

An adapter is the digest of its files, and its name is a label. The launcher has the list. The front that is asked for a
change has all engines read the adapter first, then tells the launcher. The launcher writes the list into a file, has
every front read it, and answers once they have. So a front or an engine that starts later has the list, too: fronts
name the adapters to every engine before its first request.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from text_generation_common.adapters.content import digest_of
from text_generation_common.adapters.listed import MAX_NAME
from text_generation_common.errors import ModelError
from text_generation_common.flags.model import MAX_ADAPTERS
from text_generation_common.link import AdapterNote, Link, LinkEvent, LinkMessage, read_adapters
from text_generation_common.tasks import cancelled
from text_generation_router.engine.protocol import TEMPORARY, AdapterEngine
from text_generation_router.errors import AdapterError, AdapterUnsettledError, NoSuchAdapterError

logger = logging.getLogger(__name__)

# Seconds for all fronts to take a new list, and between two looks whether an adapter has requests.
ANSWER_S, LOOK_S = 20.0, 0.1
MAX_SHOWN = 200  # characters of a path in an error


class ServedAdapters:
    """`digests` are those of the adapters' names; with each change there is another mapping, so that it can be kept."""

    def __init__(
        self,
        digests: Mapping[str, str],
        folders: Iterable[Path] = (),
        link: Link | None = None,
        other_names: Iterable[str] = (),
    ) -> None:
        """`digests`: at the start. `folders`: real ones, from which adapters may be loaded; none: no adapter may.
        `link`: the line to the launcher; None: there is none. `other_names`: those that mean the model itself."""
        self.digests = dict(digests)
        self.engine: AdapterEngine | None = None  # set before the first adapter is loaded
        self.on_change: Callable[[Iterable[str]], None] = lambda names: None
        self._folders = tuple(folders)
        self._link = link
        self._other_names = frozenset(other_names)
        self._notes = {name: AdapterNote(name, "", digest) for name, digest in digests.items()}
        self._version = 0
        self._changing, self._reading = asyncio.Lock(), asyncio.Lock()
        # The launcher's, by the numbers of changes; not those that came too late.
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def may_change(self) -> bool:
        return bool(self._folders)

    @property
    def exist(self) -> bool:
        """Whether a name that is not known may mean an adapter that was served, or will be."""
        return bool(self.digests) or self.may_change

    async def load(self, name: str, path: str, in_place: bool | None) -> None:
        """Serves the adapter in the folder `path` by this name. `in_place`: whether an adapter that has the name may be
        replaced; None: if its files are others. Its requests go on with it. AdapterError: nothing has changed, unless
        its text says otherwise."""
        if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name in self._other_names:
            raise AdapterError("`lora_name` is not a name that an adapter can have here", "lora_name")
        async with self._changing:
            folder = self._inside(path)
            try:
                digest = await asyncio.to_thread(digest_of, folder, self._folders)
            except ModelError as error:
                raise AdapterError(str(error), "lora_path") from None
            before = self.digests.get(name)
            if before is not None and not in_place and (in_place is False or before == digest):
                raise AdapterError(f"The lora adapter '{name}' has already been loaded.", "lora_name")
            if before is None and len(self.digests) >= MAX_ADAPTERS:
                raise AdapterError(f"{MAX_ADAPTERS} adapters are served, and there cannot be more")
            assert self.engine is not None
            if refusals := await self.engine.load_adapter(digest, str(folder)):
                is_temporary = all(why.startswith(TEMPORARY) for why in refusals.values())
                kind = AdapterUnsettledError if is_temporary else AdapterError
                raise kind("; ".join(f"{engine}: {why}" for engine, why in refusals.items()), "lora_path")
            await self._commit(AdapterNote(name, str(folder), digest))
            logger.info("The adapter %s is served: %s in %s", ascii(name), digest, folder)

    async def unload(self, name: str) -> None:
        """Ends the name. Returns when no request has the adapter any more, unless it is served by another name."""
        async with self._changing:
            if (digest := self.digests.get(name)) is None:
                raise NoSuchAdapterError(f"The lora adapter '{name[:MAX_NAME]}' cannot be found.", "lora_name")
            await self._commit(AdapterNote(name))
            logger.info("The adapter %s is not served any more", ascii(name))
        assert self.engine is not None
        while digest not in self.digests.values() and await self.engine.num_with_adapter(digest):
            await asyncio.sleep(LOOK_S)

    def _inside(self, path: str) -> Path:
        """The real folder, wherever links lead. AdapterError unless it lies in one that was named at the start."""
        shown = ascii(path)[1:-1][:MAX_SHOWN]
        try:
            folder = Path(path).resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte
            raise AdapterError(f"`lora_path` {shown} is not a path", "lora_path") from None
        if not Path(path).is_absolute() or not any(folder.is_relative_to(each) for each in self._folders):
            raise AdapterError(f"`lora_path` {shown} is not a path within the folders of --lora-dirs", "lora_path")
        if not folder.is_dir():
            raise NoSuchAdapterError(f"`lora_path` {shown}: there is no such folder", "lora_path")
        return folder

    async def _commit(self, note: AdapterNote) -> None:
        """Has all fronts of the launcher take the change, this one included."""
        if self._link is None:
            await self._set({**self._notes, note.name: note} if note.digest else self._without(note.name))
            return
        number = random.getrandbits(32)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._link.send(LinkMessage(LinkEvent.ADAPTER, number, adapter=note))
        try:
            reason = await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError:
            reason = f"the launcher did not answer within {ANSWER_S:g} s, and may make the change later"
        finally:
            self._answers.pop(number, None)
        if reason:
            raise AdapterUnsettledError(reason)

    def _without(self, name: str) -> dict[str, AdapterNote]:
        return {other: note for other, note in self._notes.items() if other != name}

    def take(self, message: LinkMessage) -> None:
        """Takes a message of the launcher; others than those about adapters have no effect."""
        if message.event is LinkEvent.ADAPTERS:
            task = asyncio.create_task(self._read(message.address, message.epoch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif message.event is LinkEvent.ADAPTER_SET:
            answer = self._answers.get(message.epoch)
            if answer is not None and not answer.done():
                answer.set_result(message.reason)

    async def _read(self, file: str, version: int) -> None:
        assert self._link is not None
        async with self._reading:
            if version > self._version:
                try:
                    notes = read_adapters(file)
                except (OSError, ValueError):
                    logger.exception("the list of adapters cannot be read")
                    return  # the launcher tells the administrator that this front has not taken it
                self._version = version
                await self._set({note.name: note for note in notes})
            self._link.send(LinkMessage(LinkEvent.ADAPTERS_TAKEN, epoch=version))

    async def _set(self, notes: dict[str, AdapterNote]) -> None:
        if self.engine is not None:
            await self.engine.learn_adapters({note.digest: note.folder for note in notes.values() if note.folder})
        self._notes, self.digests = notes, {name: note.digest for name, note in notes.items()}
        self.on_change(self.digests)

    async def close(self) -> None:
        await cancelled(*self._tasks)
