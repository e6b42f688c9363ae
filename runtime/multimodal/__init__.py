"""Images and audio: from bytes to what an encoder program reads, without torch.

| image processor (transformers' class) | difference from transformers' default (torchvision) |
| --- | --- |
| Qwen2VLImageProcessor (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5) | none |
| Gemma3ImageProcessor, Gemma4ImageProcessor | none |
| PixtralImageProcessor (Pixtral, Mistral 3) | none |
| CLIPImageProcessor, SiglipImageProcessor, ViTImageProcessor, BlipImageProcessor | none |
| LlavaImageProcessor, LlavaNextImageProcessor, LlavaOnevisionImageProcessor | none |
| GotOcr2ImageProcessor (InternVL) | none |
| Idefics3ImageProcessor, SmolVLMImageProcessor | none |
| Llama4ImageProcessor, MllamaImageProcessor | none |

transformers' variants on Pillow differ by one level of 255 where an image is resized.
"""
