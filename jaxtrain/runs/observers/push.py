"""Single push to the Hugging Face Hub in its own process: `python -m jaxtrain.runs.observers.push`.

    stdin    a line {"repo", "private", "branch", "make", "folder", "message", "place", "clear"}
    stdout   a line {"repo"}, or {"status", "kind", "text"} of what went wrong

The Hub's client waits without end for a server that has fallen silent, and so do its threads when
Python ends; this process can be killed. It ends by itself when its stdin closes: with the run.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any


def push(job: Mapping[str, Any]) -> dict[str, Any]:
    """Make the repository and its branch, where the job says so, and commit a folder to it, if it
    names one. Never raises: what went wrong is in what it returns."""
    from huggingface_hub import HfApi

    try:
        api, repo = HfApi(library_name="jaxtrain"), job["repo"]
        if job["make"]:
            repo = api.create_repo(repo, private=job["private"], exist_ok=True).repo_id
            if job["branch"] is not None:
                api.create_branch(repo, branch=job["branch"], exist_ok=True)
        if job["folder"] is not None:
            api.upload_folder(
                repo_id=repo,
                folder_path=job["folder"],
                revision=job["branch"],
                commit_message=job["message"],
                path_in_repo=job["place"],
                # Of an older checkpoint there nothing may stay.
                delete_patterns="*" if job["clear"] else None,
            )
        return {"repo": repo}
    except Exception as error:  # the border: network, rights, disk
        chain = list(causes(error))
        answered = [cause for cause in chain if getattr(cause, "response", None) is not None]
        chosen = [*answered, *reversed(chain)][0]
        status = getattr(getattr(chosen, "response", None), "status_code", None)
        text = str(chosen).strip().partition("\n")[0]
        return {"status": status, "kind": type(chosen).__name__, "text": text}


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def main() -> None:
    """Read a job from stdin, push it, and print the outcome."""
    job = json.loads(sys.stdin.readline())

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    print(json.dumps(push(job)), flush=True)
    os._exit(0)  # whatever threads of the client still wait


if __name__ == "__main__":
    main()
