// Writes a larger model that generates exactly the text of a small one, at the cost of a larger one: for measurements.

#include "engines/inflate.hpp"

#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <string>

int main(int argc, char** argv) {
  CLI::App app("Makes a Llama model larger and slower without changing what it computes.");
  std::string source, target;
  lookahead::engines::InflateOptions sizes;
  app.add_option("source", source, "The model, a GGUF file")->required();
  app.add_option("target", target, "The file to write; replaced if it exists")->required();
  app.add_option("--width", sizes.width, "The source's times a power of 4; 0: the source's")->capture_default_str();
  app.add_option("--blocks", sizes.blocks, "At least the source's; 0: the source's")->capture_default_str();
  app.add_option("--feed", sizes.feed, "Width of the feed-forward, at least the source's; 0: the source's")
      ->capture_default_str();
  app.add_option("--seed", sizes.seed, "Picks the weights that nothing comes of")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    lookahead::engines::inflate_file(source, target, sizes);
  } catch (const std::exception& error) {
    std::cerr << "inflate: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
