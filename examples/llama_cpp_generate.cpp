// The demo on llama.cpp: any GGUF file that it can load. `llama_cpp_generate --help` lists the options.
#define LOOKAHEAD_DEMO_ENGINE "llama_cpp_demo.hpp"
#include "generate.cpp"
