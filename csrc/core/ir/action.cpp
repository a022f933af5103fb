#include "core/ir/action.h"

#include <charconv>
#include <stdexcept>

#include "core/ir/action_kinds.h"

namespace fold3d::core {
namespace {

[[noreturn]] void reject(std::string_view text, const std::string& why) {
  std::string kinds;
  std::string without_micro_batch;
  for (int k = 0; k < kNumKinds; ++k) {
    const ActionKind& kind = about(static_cast<Kind>(k));
    (kind.has_micro_batch ? kinds : without_micro_batch) += " " + std::string(kind.text);
  }
  throw std::invalid_argument("'" + std::string(text) + "' is not an action: " + why +
                              ". Write <chunk><kind><micro-batch>, as in 2F0 or 1SEND_F3, with a kind out of" + kinds +
                              ", or <chunk>" + without_micro_batch.substr(1) + " without a micro-batch");
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

int parse_number(std::string_view digits, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || digits.size() > 9) {
    reject(text, "'" + std::string(digits) + "' is not a number of at most nine digits");
  }
  return value;
}

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

}  // namespace

std::string_view to_string(Kind kind) { return about(kind).text; }

std::string to_string(const Action& action) {
  std::string text = std::to_string(action.chunk);
  text += to_string(action.kind);
  if (about(action.kind).has_micro_batch) text += std::to_string(action.micro_batch);
  return text;
}

Action parse_action(std::string_view text) {
  const std::string_view cell = trim(text);
  std::size_t kind_begin = 0;
  while (kind_begin < cell.size() && is_digit(cell[kind_begin])) ++kind_begin;
  std::size_t kind_end = kind_begin;
  while (kind_end < cell.size() && !is_digit(cell[kind_end])) ++kind_end;
  const std::string_view kind_text = cell.substr(kind_begin, kind_end - kind_begin);
  if (kind_begin == 0) reject(text, "it does not begin with the number of a chunk");

  for (int k = 0; k < kNumKinds; ++k) {
    const ActionKind& kind = about(static_cast<Kind>(k));
    if (kind.text != kind_text) continue;
    Action action{parse_number(cell.substr(0, kind_begin), text), kind.kind, -1};
    const std::string_view number = cell.substr(kind_end);
    if (!kind.has_micro_batch) {
      if (!number.empty()) reject(text, std::string(kind.text) + " covers all micro-batches and takes no number");
      return action;
    }
    if (number.empty()) reject(text, "the micro-batch is missing");
    action.micro_batch = parse_number(number, text);
    return action;
  }
  reject(text, "the kind '" + std::string(kind_text) + "' is unknown");
}

bool is_compute(Kind kind) { return about(kind).role == Role::kCompute; }
bool is_send(Kind kind) { return about(kind).role == Role::kSend; }
bool is_recv(Kind kind) { return about(kind).role == Role::kRecv; }
bool is_copy(Kind kind) { return about(kind).role == Role::kCopy; }
bool is_offload(Kind kind) {
  return kind == Kind::kOffload || kind == Kind::kOffloadForward || kind == Kind::kOffloadBackward;
}

}  // namespace fold3d::core
