// The demo on PyTorch's C++ library: Llama models in GGUF files. `torch_generate --help` lists the options.
#define LOOKAHEAD_DEMO_ENGINE "torch_demo.hpp"
#include "generate.cpp"
