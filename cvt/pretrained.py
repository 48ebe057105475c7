"""The methods of ``huggingface_hub.PyTorchModelHubMixin``, without importing that package."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from cvt_kernels import checks

from .checkpoints import build_fitting, load_checkpoint, read_checkpoint, warn_of_activation
from .extras import require
from .huggingface import Preprocessing, write_model

_PathLike = str | os.PathLike[str]
_Model = TypeVar("_Model", bound="PretrainedModel")


class PretrainedModel(nn.Module):
    """A mixin for models: saving to and loading from directories and the Hugging Face Hub.

    Attributes:
        labels: Class names of the checkpoint that was loaded, or None.
        preprocessing: The images that its weights were trained with, or None.
    """

    labels: list[str] | None = None
    preprocessing: Preprocessing | None = None

    @classmethod
    def from_pretrained(
        cls: type[_Model],
        pretrained_model_name_or_path: _PathLike,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: _PathLike | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        **overrides: Any,
    ) -> _Model:
        """Builds a checkpoint's model with its weights, in evaluation mode.

        Args:
            pretrained_model_name_or_path: What ``create_model`` takes as ``checkpoint``: a directory, a file,
                or ``"owner/name"`` on the Hub.
            revision: A branch, a tag or a commit of a model on the Hub.
            token: For a private or gated one; None for ``HF_TOKEN`` or the login of this machine.
            cache_dir: The cache; None for ``huggingface_hub``'s default.
            force_download: Download even cached files.
            local_files_only: Download nothing.
            **overrides: Fields of ``CvTConfig`` to change, such as ``num_classes=10``.

        Raises:
            TypeError: An argument of the wrong type, or an override that is not a field.
            ValueError: An override out of range.
            FileNotFoundError: There is no such checkpoint.
            CheckpointError: It is not one of a CvT, or cannot be fetched.
        """
        checks.check_path("pretrained_model_name_or_path", pretrained_model_name_or_path)
        if revision is not None:
            checks.check_kind("revision", revision, str)
        if token is not None:
            checks.check_kind("token", token, str, bool)
        if cache_dir is not None:
            checks.check_path("cache_dir", cache_dir)
        checks.check_flag("force_download", force_download)
        checks.check_flag("local_files_only", local_files_only)
        download: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        download |= {"force_download": force_download, "local_files_only": local_files_only}
        state = read_checkpoint(pretrained_model_name_or_path, **download)
        config = state.configuration(**overrides)
        if "activation" not in overrides:
            warn_of_activation(state)
        model_class: Any = cls
        model = build_fitting(state, lambda: model_class(config))
        load_checkpoint(model, state)
        return model.eval()

    def save_pretrained(
        self,
        save_directory: _PathLike,
        *,
        labels: Sequence[str] | None = None,
        image_size: int | None = None,
        crop_fraction: float | None = None,
    ) -> None:
        """Saves the model as a directory from which this package restores it exactly.

        transformers loads it too, if its CvT can express the model; it always runs exact GELU.

        Args:
            save_directory: Made if it does not exist; ``config.json``, ``model.safetensors`` and
                ``preprocessor_config.json`` in it are replaced.
            labels: Class names; None for :attr:`labels`.
            image_size: Pixels of each side of its images; None as in :attr:`preprocessing`, or else
                224 (384 for ``"cvt_w24"``).
            crop_fraction: As in :func:`cvt.images.preprocess`, for this ``image_size``.

        Raises:
            TypeError: Labels that are not strings.
            ValueError: Not one label per class, a size out of range, or a directory of ``cvt train``.
            OSError: The directory cannot be written.
        """
        write_model(self, save_directory, labels=labels, image_size=image_size, crop_fraction=crop_fraction)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Push model using cvt-kernels",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool | None = None,
        **save: Any,
    ) -> str:
        """Uploads what :meth:`save_pretrained` writes; makes the repository if it does not exist.

        Args:
            repo_id: ``"owner/name"``.
            commit_message: Its first line is the title of the commit.
            private: For a new repository; None for the default of its owner.
            token: A token that may write; None for ``HF_TOKEN`` or the login of this machine.
            branch: None for the main branch.
            create_pr: Open a pull request in place of a commit.
            **save: Arguments of :meth:`save_pretrained`.

        Returns:
            The address of the commit.

        Raises:
            ModuleNotFoundError: The ``hf`` extra is not installed.
        """
        api = require("huggingface_hub", "hf").HfApi(token=token)
        visibility = {} if private is None else {"private": private}
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **save)
            repository = api.create_repo(repo_id, exist_ok=True, **visibility).repo_id
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=commit_message,
                revision=branch,
                create_pr=create_pr,
            )
        return str(commit.commit_url)
