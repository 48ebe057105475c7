"""CvT as a backbone of transformers, for its models of detection and segmentation.

After ``import cvt.backbone``, ``AutoConfig`` and ``AutoBackbone`` know the model type ``cvt_backbone``. The
stages are Hugging Face's own, so ``cvt_kernels.accelerate`` serves them inside any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from cvt_kernels import checks

from .extras import require
from .huggingface import OWN_CONFIG, architecture, own_config, stages_to_huggingface, why_stages_inexpressible
from .model import Stages

_transformers = require("transformers", "hf")
_cvt = require("transformers.models.cvt.modeling_cvt", "hf")
_activations = require("transformers.activations", "hf")
_outputs = require("transformers.modeling_outputs", "hf")
try:  # transformers 5
    _mixins = require("transformers.backbone_utils", "hf")
except ModuleNotFoundError:
    _mixins = require("transformers.utils.backbone_utils", "hf")

#: What transformers calls our activations.
_ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_tanh": "gelu_pytorch_tanh"}


class CvtBackboneConfig(_mixins.BackboneConfigMixin, _transformers.CvtConfig):  # type: ignore[name-defined]
    """The configuration of a :class:`CvtBackbone`: that of Hugging Face's CvT, and the maps to return.

    Args:
        out_features: Names of the stages whose maps are returned, of ``stage1``, ``stage2``, …, in this
            order; None for ``out_indices``.
        out_indices: Their numbers from 0; None for the last stage.
        hidden_act: The activation of the MLPs, as transformers names it.
        **kwargs: Fields of ``transformers.CvtConfig``.
    """

    model_type = "cvt_backbone"

    def __init__(
        self,
        *,
        out_features: list[str] | None = None,
        out_indices: Sequence[int] | None = None,
        hidden_act: str = "gelu",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if hidden_act not in _activations.ACT2FN:
            raise ValueError(f"hidden_act: got {hidden_act!r}, expected an activation of transformers")
        self.hidden_act = hidden_act
        self.stage_names = [f"stage{i}" for i in range(1, len(self.depth) + 1)]
        self.out_indices = out_indices
        if out_features is not None:
            given = self.out_features  # type: ignore[has-type]
            self.out_features = out_features
            if out_indices is not None and given != self.out_features:
                raise ValueError(f"out_features: got {out_features} beside out_indices={out_indices}")

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a configuration as transformers does, of Hugging Face's CvT and of our classifier too."""
        content, rest = super().get_config_dict(*args, **kwargs)
        if content.get("model_type") == _transformers.CvtConfig.model_type:
            own = own_config(content)
            activation = "gelu" if own is None else own.activation
            content = {**content, "model_type": cls.model_type, "hidden_act": _ACTIVATIONS[activation]}
            content.pop(OWN_CONFIG, None)
        return content, rest


class CvtBackbone(_mixins.BackboneMixin, _transformers.CvtModel):  # type: ignore[name-defined]
    """The stages of Hugging Face's CvT as a backbone; checkpoints of its CvT load into it.

    Args:
        config: A :class:`CvtBackboneConfig`, which detectors and segmenters take as ``backbone_config``.

    Shape:
        Images (B, num_channels, H, W); ``feature_maps``, a tuple of maps (B, C, H, W), one for each of
        ``out_features``. Stages after the last of these are not computed.
    """

    config_class = CvtBackboneConfig
    has_attentions = False
    # Of a classifier's head.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^layernorm\.", r"^classifier\."]

    def __init__(self, config: CvtBackboneConfig):
        super().__init__(config)
        if hasattr(self, "_init_backbone"):  # transformers 4
            self._init_backbone(config)
        self.num_features = list(config.embed_dim)
        for module in self.modules():
            if isinstance(module, _cvt.CvtIntermediate):
                module.activation = _activations.ACT2FN[config.hidden_act]

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Returns the maps of the requested stages; as ``hidden_states`` those of all, if asked for."""
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        indices = [self.stage_names.index(name) for name in self.out_features]
        count = len(self.stage_names) if output_hidden_states else max(indices) + 1
        maps: tuple[Tensor, ...] = ()
        for stage in self.encoder.stages[:count]:
            pixel_values, _ = stage(pixel_values)
            maps += (pixel_values,)
        features = tuple(maps[i] for i in indices)
        hidden_states = maps if output_hidden_states else None
        if return_dict is False:
            return (features,) if hidden_states is None else (features, hidden_states)
        return _outputs.BackboneOutput(feature_maps=features, hidden_states=hidden_states)


_transformers.AutoConfig.register(CvtBackboneConfig.model_type, CvtBackboneConfig)
_transformers.AutoBackbone.register(CvtBackboneConfig, CvtBackbone)


def backbone_of(model: Stages, *, out_features: list[str] | None = None) -> CvtBackbone:
    """Returns a copy of the stages of one of our models as a backbone of transformers.

    Args:
        model: A ``CvT``, ``CvTSegmenter`` or ``CvTFeatures`` of all stages.
        out_features: As in :class:`CvtBackboneConfig`; None for all stages.

    Returns:
        A backbone on the same device, of the same dtype and in the same mode.
    """
    checks.check_kind("model", model, Stages)
    config = model.config
    obstacle = why_stages_inexpressible(model)
    if obstacle is None and not hasattr(model, f"stage{len(config.stages) - 1}"):
        obstacle = "is without its last stages, expected a model of all stages"
    if obstacle is not None:
        raise ValueError(f"model: {obstacle}")
    fields = {name: value for name, value in architecture(config).items() if name != "model_type"}
    names = [f"stage{i}" for i in range(1, len(config.stages) + 1)]
    described = CvtBackboneConfig(
        **fields,
        hidden_act=_ACTIVATIONS[config.activation],
        out_features=names if out_features is None else out_features,
    )
    backbone = CvtBackbone(described).to(next(model.parameters())).train(model.training)
    backbone.load_state_dict(stages_to_huggingface(model.state_dict()))
    return backbone
