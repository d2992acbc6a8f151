#include "engines/gguf.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <unordered_map>
#include <utility>

namespace lookahead::engines {
namespace {

constexpr std::uint64_t max_entries = 65536;
constexpr std::uint64_t max_alignment = 65536;
constexpr std::uint32_t string_type = 8, array_type = 9;
constexpr const char* fetch_again = "; the file is damaged or incomplete, fetch it again";

/// Bytes of a metadata value of fixed size; 0 for strings, arrays and unknown types.
std::size_t scalar_bytes(std::uint32_t type) {
  constexpr std::size_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return type < std::size(bytes) ? bytes[type] : 0;
}

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::string quoted(std::string_view name) {
  // Names come from the file: keep messages printable and short.
  std::string out = "'";
  for (const char c : name.substr(0, 64)) out += c >= ' ' && c <= '~' ? c : '?';
  return out + (name.size() > 64 ? "...'" : "'");
}

/// Reads forward through the header; every read is checked against the end of the file.
class Cursor {
 public:
  Cursor(std::span<const std::byte> file, const std::string& name) : file_(file), name_(name) {}

  [[noreturn]] void fail(const std::string& what) const { throw ModelFileError(name_ + ": " + what); }

  [[nodiscard]] std::size_t position() const { return at_; }

  const std::byte* take(std::uint64_t bytes, const char* what) {
    if (bytes > file_.size() - at_)
      fail(std::string(what) + " at byte " + std::to_string(at_) + " needs " + std::to_string(bytes) +
           " bytes, but only " + std::to_string(file_.size() - at_) + " are left" + fetch_again);
    const std::byte* from = file_.data() + at_;
    at_ += static_cast<std::size_t>(bytes);
    return from;
  }

  template <class T>
  T read(const char* what) {
    return load<T>(take(sizeof(T), what));
  }

  std::string_view read_string(const char* what) {
    const auto length = read<std::uint64_t>(what);
    const std::byte* from = take(length, what);
    return {reinterpret_cast<const char*>(from), static_cast<std::size_t>(length)};
  }

  void skip_value(std::uint32_t type, std::string_view key) {
    if (type == string_type) {
      read_string("a string value");
    } else if (type == array_type) {
      const auto element = read<std::uint32_t>("an array type");
      const auto count = read<std::uint64_t>("an array length");
      if (element == string_type) {
        for (std::uint64_t i = 0; i < count; ++i) read_string("an array of strings");
      } else if (const std::size_t bytes = scalar_bytes(element); bytes != 0) {
        if (count > file_.size() / bytes)
          fail("key " + quoted(key) + " is an array of " + std::to_string(count) + " values, more than the file holds" +
               fetch_again);
        take(count * bytes, "an array");
      } else {
        fail("key " + quoted(key) + " is an array of type " + std::to_string(element) +
             "; only numbers, flags and strings are supported as elements; convert the model again");
      }
    } else if (const std::size_t bytes = scalar_bytes(type); bytes != 0) {
      const std::byte* value = take(bytes, "a value");
      if (type == 7 && load<std::uint8_t>(value) > 1)
        fail("key " + quoted(key) + " is a flag that is not 0 or 1" + fetch_again);
    } else {
      fail("key " + quoted(key) + " has the unknown type " + std::to_string(type) + "; types 0 to 12 are known" +
           fetch_again);
    }
  }

 private:
  std::span<const std::byte> file_;
  const std::string& name_;
  std::size_t at_ = 0;
};

}  // namespace

struct GgufFile::Content {
  std::string name;
  std::vector<std::byte> image;
  std::span<const std::byte> mapping;
  std::vector<GgufEntry> entries;
  std::vector<GgufTensor> tensors;
  std::unordered_map<std::string_view, std::size_t> entry_of, tensor_of;

  Content() = default;
  Content(const Content&) = delete;
  Content& operator=(const Content&) = delete;
  ~Content() {
    if (!mapping.empty()) munmap(const_cast<std::byte*>(mapping.data()), mapping.size());
  }

  void map(const std::filesystem::path& path) {
    name = path.string();
    const auto fail = [&](const std::string& what) {
      throw ModelFileError(name + ": " + what + "; check the path of the model file");
    };
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
    struct stat info {};
    const bool usable = ::fstat(file, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0;
    const auto size = static_cast<std::size_t>(usable ? info.st_size : 0);
    void* const address = usable ? ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    ::close(file);
    if (!usable) fail("is empty or not a regular file");
    if (address == MAP_FAILED) fail(std::string("cannot be mapped: ") + std::strerror(errno));
    mapping = {static_cast<const std::byte*>(address), size};
  }

  void parse(std::span<const std::byte> file) {
    Cursor in(file, name);
    if (std::memcmp(in.take(4, "the magic number"), "GGUF", 4) != 0)
      in.fail("does not start with the letters GGUF; give a model in GGUF format");
    const auto version = in.read<std::uint32_t>("the version");
    if (version != 2 && version != 3)
      in.fail("has format version " + std::to_string(version) +
              "; versions 2 and 3 (little-endian) are supported; convert the model again");
    const auto tensor_count = in.read<std::uint64_t>("the number of tensors");
    const auto entry_count = in.read<std::uint64_t>("the number of keys");
    if (tensor_count > max_entries || entry_count > max_entries)
      in.fail("announces " + std::to_string(tensor_count) + " tensors and " + std::to_string(entry_count) +
              " keys; at most " + std::to_string(max_entries) + " of each are supported" + fetch_again);

    std::uint64_t alignment = 32;
    for (std::uint64_t i = 0; i < entry_count; ++i) {
      GgufEntry entry{};
      entry.key = in.read_string("a key");
      entry.type = in.read<std::uint32_t>("a type");
      const std::size_t begin = in.position();
      in.skip_value(entry.type, entry.key);
      entry.bytes = file.subspan(begin, in.position() - begin);
      if (!entry_of.emplace(entry.key, entries.size()).second)
        in.fail("has the key " + quoted(entry.key) + " twice" + fetch_again);
      entries.push_back(entry);
      if (entry.key != "general.alignment") continue;
      alignment = entry.type == 4 ? load<std::uint32_t>(entry.bytes.data()) : 0;
      if (alignment < 8 || alignment > max_alignment || (alignment & (alignment - 1)) != 0)
        in.fail("key 'general.alignment' must be an unsigned 32-bit power of two from 8 to " +
                std::to_string(max_alignment) + fetch_again);
    }

    std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;  // offset and bytes behind the header
    for (std::uint64_t i = 0; i < tensor_count; ++i) extents.push_back(parse_tensor(in, alignment, file.size()));

    const std::uint64_t start = (in.position() + alignment - 1) / alignment * alignment;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto [offset, bytes] = extents[i];
      // Both are at most the size of the file, so the sum cannot overflow.
      if (start + offset + bytes > file.size())
        in.fail("tensor " + quoted(tensors[i].name) + " ends at byte " + std::to_string(start + offset + bytes) +
                ", but the file has " + std::to_string(file.size()) + fetch_again);
      tensors[i].data = file.subspan(static_cast<std::size_t>(start + offset), static_cast<std::size_t>(bytes));
    }
    std::vector<std::size_t> order(tensors.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return extents[a] < extents[b]; });
    for (std::size_t i = 1; i < order.size(); ++i)
      if (extents[order[i - 1]].first + extents[order[i - 1]].second > extents[order[i]].first)
        in.fail("tensors " + quoted(tensors[order[i - 1]].name) + " and " + quoted(tensors[order[i]].name) +
                " overlap" + fetch_again);
  }

  std::pair<std::uint64_t, std::uint64_t> parse_tensor(Cursor& in, std::uint64_t alignment, std::size_t file_size) {
    GgufTensor tensor{};
    tensor.name = in.read_string("a tensor name");
    const std::string label = "tensor " + quoted(tensor.name);
    const auto dimensions = in.read<std::uint32_t>("a number of dimensions");
    if (dimensions < 1 || dimensions > 4)
      in.fail(label + " has " + std::to_string(dimensions) + " dimensions; 1 to 4 are supported" + fetch_again);
    tensor.shape = {1, 1, 1, 1};
    for (std::uint32_t d = 0; d < dimensions; ++d)
      tensor.shape[d] = static_cast<std::size_t>(in.read<std::uint64_t>("a tensor shape"));
    const auto type = in.read<std::uint32_t>("a tensor type");
    const auto offset = in.read<std::uint64_t>("a tensor offset");

    const std::optional<WeightType> known = weight_type(type);
    if (!known)
      in.fail(label + " has weight type " + std::to_string(type) +
              "; F32, F16, BF16, Q8_0, Q4_0 and Q4_1 are supported; convert the model to one of them");
    tensor.type = *known;
    if (tensor.shape[0] % block_numbers(*known) != 0)
      in.fail(label + " has rows of " + std::to_string(tensor.shape[0]) + " numbers; " + weight_type_name(*known) +
              " packs " + std::to_string(block_numbers(*known)) + " at a time" + fetch_again);
    std::uint64_t bytes = block_bytes(*known);
    for (std::size_t d = 0; d < 4; ++d) {
      const std::uint64_t factor = d == 0 ? tensor.shape[0] / block_numbers(*known) : tensor.shape[d];
      if (factor == 0 || bytes > file_size / factor)
        in.fail(label + " has a dimension of 0, or is larger than the file, which has " + std::to_string(file_size) +
                " bytes" + fetch_again);
      bytes *= factor;
    }
    if (offset % alignment != 0)
      in.fail(label + " lies at offset " + std::to_string(offset) + ", which is not a multiple of the alignment " +
              std::to_string(alignment) + fetch_again);
    if (offset > file_size)
      in.fail(label + " lies at offset " + std::to_string(offset) + ", but the file has " + std::to_string(file_size) +
              " bytes" + fetch_again);
    if (!tensor_of.emplace(tensor.name, tensors.size()).second) in.fail("has the " + label + " twice" + fetch_again);
    tensors.push_back(tensor);
    return {offset, bytes};
  }

  /// The value of a key if the file has it; the caller checks the type.
  [[nodiscard]] const GgufEntry* find(std::string_view key) const {
    const auto it = entry_of.find(key);
    return it == entry_of.end() ? nullptr : &entries[it->second];
  }
};

namespace {

/// An array value: its elements, whose extent was checked when the file was opened.
struct ArrayView {
  std::uint32_t type;
  std::size_t count;
  const std::byte* data;
};

ArrayView array_of(const GgufEntry& entry) {
  return {load<std::uint32_t>(entry.bytes.data()),
          static_cast<std::size_t>(load<std::uint64_t>(entry.bytes.data() + 4)), entry.bytes.data() + 12};
}

/// The integer at `from`, or nothing where the type is none or the value exceeds a signed 64-bit integer.
std::optional<std::int64_t> integer_at(std::uint32_t type, const std::byte* from) {
  switch (type) {
    case 0:
      return load<std::uint8_t>(from);
    case 1:
      return load<std::int8_t>(from);
    case 2:
      return load<std::uint16_t>(from);
    case 3:
      return load<std::int16_t>(from);
    case 4:
      return load<std::uint32_t>(from);
    case 5:
      return load<std::int32_t>(from);
    case 10: {
      const auto value = load<std::uint64_t>(from);
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
      return static_cast<std::int64_t>(value);
    }
    case 11:
      return load<std::int64_t>(from);
    default:
      return std::nullopt;
  }
}

std::optional<double> number_at(std::uint32_t type, const std::byte* from) {
  if (type == 6) return load<float>(from);
  if (type == 12) return load<double>(from);
  return std::nullopt;
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path) {
  auto content = std::make_shared<Content>();
  content->map(path);
  content->parse(content->mapping);
  content_ = std::move(content);
}

GgufFile::GgufFile(std::vector<std::byte> image) {
  auto content = std::make_shared<Content>();
  content->name = "(memory)";
  content->image = std::move(image);
  content->parse(content->image);
  content_ = std::move(content);
}

const std::string& GgufFile::name() const { return content_->name; }
std::span<const GgufEntry> GgufFile::entries() const { return content_->entries; }
std::span<const GgufTensor> GgufFile::tensors() const { return content_->tensors; }

const GgufTensor* GgufFile::find(std::string_view tensor) const {
  const auto it = content_->tensor_of.find(tensor);
  return it == content_->tensor_of.end() ? nullptr : &content_->tensors[it->second];
}

void GgufFile::fail(const std::string& what) const { throw ModelFileError(content_->name + ": " + what); }

std::optional<std::string_view> GgufFile::text(std::string_view key) const {
  const GgufEntry* entry = content_->find(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->type != string_type) fail("key " + quoted(key) + " is not a string; convert the model again");
  return std::string_view(reinterpret_cast<const char*>(entry->bytes.data()) + 8, entry->bytes.size() - 8);
}

std::optional<std::int64_t> GgufFile::integer(std::string_view key) const {
  const GgufEntry* entry = content_->find(key);
  if (entry == nullptr) return std::nullopt;
  const auto value = integer_at(entry->type, entry->bytes.data());
  if (!value) fail("key " + quoted(key) + " is not an integer of at most 63 bits; convert the model again");
  return value;
}

std::optional<double> GgufFile::number(std::string_view key) const {
  const GgufEntry* entry = content_->find(key);
  if (entry == nullptr) return std::nullopt;
  const auto value = number_at(entry->type, entry->bytes.data());
  if (!value) fail("key " + quoted(key) + " is not a floating-point number; convert the model again");
  return value;
}

std::optional<bool> GgufFile::flag(std::string_view key) const {
  const GgufEntry* entry = content_->find(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->type != 7) fail("key " + quoted(key) + " is not a flag; convert the model again");
  return load<std::uint8_t>(entry->bytes.data()) != 0;
}

std::optional<std::vector<std::string_view>> GgufFile::texts(std::string_view key) const {
  const GgufEntry* entry = content_->find(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->type != array_type || array_of(*entry).type != string_type)
    fail("key " + quoted(key) + " is not an array of strings; convert the model again");
  const ArrayView array = array_of(*entry);
  std::vector<std::string_view> out(array.count);
  const std::byte* from = array.data;
  for (std::string_view& s : out) {
    s = {reinterpret_cast<const char*>(from) + 8, static_cast<std::size_t>(load<std::uint64_t>(from))};
    from += 8 + s.size();
  }
  return out;
}

std::optional<std::vector<float>> GgufFile::numbers(std::string_view key) const {
  const GgufEntry* entry = content_->find(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->type != array_type || array_of(*entry).type != 6)
    fail("key " + quoted(key) + " is not an array of 32-bit floating-point numbers; convert the model again");
  const ArrayView array = array_of(*entry);
  std::vector<float> out(array.count);
  if (!out.empty()) std::memcpy(out.data(), array.data, out.size() * sizeof(float));
  return out;
}

std::optional<std::vector<std::int32_t>> GgufFile::integers(std::string_view key) const {
  const GgufEntry* entry = content_->find(key);
  if (entry == nullptr) return std::nullopt;
  const std::uint32_t type = entry->type == array_type ? array_of(*entry).type : string_type;
  if (type != 4 && type != 5)
    fail("key " + quoted(key) + " is not an array of 32-bit integers; convert the model again");
  const ArrayView array = array_of(*entry);
  std::vector<std::int32_t> out(array.count);
  if (!out.empty()) std::memcpy(out.data(), array.data, out.size() * sizeof(std::int32_t));
  return out;
}

}  // namespace lookahead::engines
